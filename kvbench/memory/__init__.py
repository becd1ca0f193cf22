"""Where keys and values live: one store a layer, with a tier on the device and one on the host."""
