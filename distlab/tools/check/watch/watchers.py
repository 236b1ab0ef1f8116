"""All observers of a process: of its calls (`install_recorder`), and of the training."""

from pathlib import Path

from distlab.tools.check.watch.axes import Axes
from distlab.tools.check.watch.handles import Handles, Waits
from distlab.tools.check.watch.layouts import Layouts
from distlab.tools.check.watch.lost_results import LostResults
from distlab.tools.check.watch.patches import leave_uncompiled
from distlab.tools.check.watch.places import Places
from distlab.tools.check.watch.recorder import Recorder
from distlab.tools.check.watch.replicas import ReplicaSteps
from distlab.tools.check.watch.reporter import Reporter
from distlab.tools.check.watch.training import Training


def install_recorder(reporter: Reporter, folder: Path, store_port: int) -> tuple[Recorder, Waits]:
    """Install the observers of calls, handles and waits; `folder` is the script's."""
    places = Places(reporter, folder)
    places.install()
    recorder = Recorder(reporter, places)
    recorder.install()
    Layouts(recorder).install()
    Handles(recorder).install()
    waits = Waits(recorder, lambda sentence: reporter.send("changed", sentence), store_port)
    waits.install()
    leave_uncompiled()
    return recorder, waits


def watch_training(recorder: Recorder, every: int) -> None:
    """Install the observers of training; replicas are compared every `every` steps."""
    Training(recorder).install()
    ReplicaSteps(recorder, every).install()
    Axes(recorder).install()
    LostResults(recorder).install()
