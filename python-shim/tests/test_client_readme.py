"""The code in the README runs as it stands there."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from client_stage import Stage


def examples(root: pathlib.Path) -> list[str]:
    text = (root / "python-shim/README.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


@pytest.mark.parametrize("at", [0, 1])
def test_an_example_runs(stage: Stage, root: pathlib.Path, at: int) -> None:
    found = examples(root)
    assert len(found) == 2
    code = found[at].replace("http://127.0.0.1:7070", stage.url)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code], capture_output=True, text=True, timeout=100, env=env
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    assert ("not_found 404 False" if at == 0 else "turn_finished tokens-1 1") in run.stdout
