"""How long torch's threads spin for one another is said before torch loads, and only where the user said nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from driver import slow

from kvbench.cli.threads import SET_BY_USER, SPINS

# What the environment holds when torch is loaded, by the first command that needs it.
ASKED = """
import json, os, sys
from importlib.abc import MetaPathFinder

class Watch(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(json.dumps({key: os.environ.get(key) for key in %r}), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
import runpy
sys.argv[1:] = %r
runpy.run_module("kvbench", run_name="__main__")
"""


def when_torch_loads(*words: str, **environment: str) -> dict[str, str | None]:
    """OpenMP's settings as torch would read them."""
    rest = {key: value for key, value in os.environ.items() if key not in SET_BY_USER}
    command = [sys.executable, "-c", ASKED % (SET_BY_USER, list(words))]
    done = subprocess.run(command, env=rest | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("command", [[], *slow(["demo"])])
def test_threads_spin_briefly_where_nothing_else_was_said(tmp_path, command):
    found = when_torch_loads(*command, "model=dummy-tiny", f"results_dir={tmp_path}")
    assert found == {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": str(SPINS)}


@pytest.mark.parametrize("set_by_user", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_the_user_set_stands(tmp_path, set_by_user):
    found = when_torch_loads("model=dummy-tiny", f"results_dir={tmp_path}", **set_by_user)
    assert found == dict.fromkeys(SET_BY_USER) | set_by_user
