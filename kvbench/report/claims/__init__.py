"""What the papers claim, as criteria over runs, files of measurements and printed numbers; and the
verdict on each.
"""
