"""Export a checkpoint as one file that torch.load opens: `distlab checkpoint export RUN_OR_PATH OUT.pt`.

The file is a dictionary: "weights" and "optimizer" have dense tensors by name (a model's `load_state_dict` accepts the
weights directly), "variant", "step" and "settings" describe them. Exit code 2 if there is no intact checkpoint.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distlab.cli import prints_refusals
from distlab.lab.checkpoint import locate
from distlab.lab.checkpoint.locate import FoundCheckpoint
from distlab.lab.checkpoint.manifest import Unreadable
from distlab.lab.report.table import log_line


@prints_refusals
def main(arguments: Sequence[str] | None = None) -> int:
    """Find a checkpoint, check, gather and export it; returns the exit code."""
    options = parser().parse_args(arguments)
    found = locate.newest_good(options.source, lambda text: print(f"checkpoint {text}", file=sys.stderr))
    if found is None:
        raise Unreadable(f"{options.source} has no checkpoint: name the folder of a run or of a checkpoint")
    variant = chosen(found, options.variant)
    export(found, variant, options.out)
    print(log_line("exported", f"{variant} after {found.manifest.step} steps ({found.folder}) to {options.out}"))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="distlab checkpoint", description=(__doc__ or "").split("\n\n")[0])
    commands = made.add_subparsers(required=True, metavar="export")
    command = commands.add_parser("export", help="write a checkpoint as one file that torch.load opens")
    command.add_argument("source", type=Path, metavar="RUN_OR_PATH", help="folder of a run, or of one checkpoint")
    command.add_argument("out", type=Path, metavar="OUT.pt", help="the file to write")
    command.add_argument("--variant", help="the variant to export, if the checkpoint has several")
    return made


def chosen(found: FoundCheckpoint, variant: str | None) -> str:
    """Return the variant to export; raises Unreadable if it is missing or ambiguous."""
    names = list(found.manifest.steps)
    if variant is None and len(names) == 1:
        return names[0]
    if variant in names:
        return str(variant)
    fault = f"and not {variant}" if variant is not None else "so choose one"
    raise Unreadable(f"{found.folder} has {', '.join(names)}, {fault}: --variant {names[0]}")


def export(found: FoundCheckpoint, variant: str, out: Path) -> None:
    """Write one variant's dense tensors to `out`, the complete file or nothing; raises OSError."""
    import torch

    from distlab.lab.checkpoint import storage

    dense = storage.load_dense(found.folder, f"{variant}/")
    content: dict[str, Any] = {"variant": variant, "step": found.manifest.step, "settings": found.manifest.settings}
    for name, tensor in dense.items():
        kind, _, label = name.partition(".")
        content.setdefault(kind, {})[label] = tensor
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            torch.save(content, file)
        draft.replace(out)
    except (OSError, RuntimeError) as error:
        of_disk = storage.disk_error(error)
        if of_disk is None:
            raise
        raise OSError(of_disk.errno, of_disk.strerror, str(out)) from None
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
