"""kvbench's methods inside vLLM's CPU engine, which schedules and holds the keys and values."""

from kvbench.config import PACKAGE


def how_to_have_vllm() -> str:
    """How to make the environment that vLLM has of its own: by make in a checkout, by pip beside a
    wheel.
    """
    if (PACKAGE.parent / "Makefile").is_file():
        return "make setup-vllm makes an environment with it"
    made = "python -m venv FOLDER; FOLDER/bin/pip install 'kvbench[vllm]'"
    return f"{made} makes an environment with it, which KVBENCH_VLLM=FOLDER names"
