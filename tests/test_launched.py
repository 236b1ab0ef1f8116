"""A command that hangs fails its test with its stacks, and those of its children."""

import os
import sys
import time

import pytest

from tests.launched import ended, tree

pytestmark = pytest.mark.timeout(60)
PARENT = """
import os, time
def child_that_waits():
    os.read(os.pipe()[0], 1)
def parent_that_waits():
    os.read(os.pipe()[0], 1)
print("begun", flush=True)
parent_that_waits() if os.fork() else child_that_waits()
"""


def test_a_command_that_ends_returns_its_code_and_output() -> None:
    done = ended([sys.executable, "-c", "print(1); exit(3)"], environ=os.environ, timeout_s=30)
    assert (done.returncode, done.stdout) == (3, "1\n")


def test_a_command_that_hangs_fails_with_all_stacks() -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        ended([sys.executable, "-c", PARENT], environ=os.environ, timeout_s=3)
    assert "has not ended after 3 s" in str(failed.value)
    for words in ("begun", "in child_that_waits", "in parent_that_waits"):
        assert words in str(failed.value)


def test_the_tree_is_the_process_and_its_children() -> None:
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    try:
        assert {os.getpid(), child} <= set(tree(os.getpid()))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
