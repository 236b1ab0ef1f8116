"""The test file on a rank, its asserts rewritten as pytest does in its own process."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.assertion import AssertionState, pytest_assertrepr_compare, util
from _pytest.assertion.rewrite import AssertionRewritingHook, assertstate_key

AUTOLOAD = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"  # other plugins have no part in an assert


def settings(patterns: Sequence[str]) -> pytest.Config:
    """pytest's settings as they are without a file of settings, but for which files are rewritten."""
    autoload = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "1"
    try:
        words = ["-c", os.devnull, "--rootdir", os.curdir, "--noconftest", "-p", "no:cacheprovider"]
        config = pytest.Config.fromdictargs({}, words)
    finally:
        if autoload is None:
            del os.environ[AUTOLOAD]
    config._inicache["python_files"] = list(patterns)
    return config


def install(patterns: Sequence[str]) -> None:
    """Rewrite what is imported from here on and fits; explain comparisons as pytest does."""
    config = settings(patterns)
    config.stash[assertstate_key] = AssertionState(config, "rewrite")
    hook = AssertionRewritingHook(config)
    sys.meta_path.insert(0, hook)

    def explained(op: str, left: object, right: object) -> str | None:
        lines = pytest_assertrepr_compare(config, op, left, right)
        return "\n~".join(line.replace("%", "%%") for line in lines) if lines else None

    util._reprcompare = explained


def test_module(name: str, file: str) -> ModuleType:
    """The module of a test file, imported once."""
    hook = next(each for each in sys.meta_path if isinstance(each, AssertionRewritingHook))
    if file not in hook.fnpats:
        hook.fnpats.append(file)  # whatever it is called
    loaded = sys.modules.get(name)
    if loaded is not None and is_of(loaded, file):
        return loaded
    try:
        found = importlib.import_module(name)
        if is_of(found, file):
            return found
    except ImportError:
        pass  # pytest's importmode=importlib: its name is no path
    spec = hook.find_spec(name, [str(Path(file).parent)]) or importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def is_of(module: ModuleType, file: str) -> bool:
    """Whether a module was made of this file."""
    return module.__file__ is not None and Path(module.__file__).resolve() == Path(file).resolve()
