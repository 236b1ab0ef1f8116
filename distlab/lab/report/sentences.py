"""A run in sentences: verdict, failed checks, lost ranks, the injected bug, and the command to repeat it."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from distlab.lab.config import ON_ONE_MACHINE
from distlab.lab.config.launchers import EACH_RANK
from distlab.lab.config.settings import is_path
from distlab.lab.report.fault_checks import fault_sentence
from distlab.lab.report.records import Ranks, Run
from distlab.lab.report.units import allowed, counted, difference, name_ranks, quantity
from distlab.lab.report.verdict import PROOF, SCRIPT, first, times_steps

COMPOSE = "docker compose up"
FINDINGS = "findings"  # the unit of a check that counts them
UNTIL_ENDED = "until the run was ended at its first finding"  # the detail of a check without a finding by then
# Names for failed checks of a script; the name in run.json states what holds if it passes.
WHEN_FAILED = {
    "calls match": "calls do not match",
    "nothing hangs": "ranks hang",
    "the script ends well": "the script fails",
    "handles are waited for": "a handle is never waited for",
    "tensors are at rest in flight": "a tensor is written in flight",
    "replicas agree": "replicas differ",
    "ranks train on their own data": "ranks train on the same data",
    "dropout agrees": "dropout differs",
    "a device a rank": "ranks share a device",
    "ranks begin with the model": "ranks begin with other weights",
    "all is trained": "not all is trained",
    "dropout by axis": "dropout is wrong along an axis",
}
UNSEEN = "not visible"  # traffic and waits inside a library's own passes


class Shares(NamedTuple):
    """Shares of all ranks' time in the drawn step, as parts of 1."""

    compute: float
    communication: float  # including waiting for other ranks
    idle: float

    def in_words(self, *, seen: bool) -> str:
        """Return the shares in words; if communication is not `seen`, a library's compute includes it."""
        if not seen:
            whole = self.compute + self.communication
            return f"compute, communication and waiting {whole:.0%} ({UNSEEN} separately), idle {self.idle:.0%}"
        return f"compute {self.compute:.0%}, communication and waiting {self.communication:.0%}, idle {self.idle:.0%}"


def headline(run: Run) -> str:
    """Return the verdict in one phrase: the number of passed checks, or the names of failed ones."""
    if run["verdict"] in ("lost", "refused"):
        ends = [lost_sentence(lost) for lost in run["lost"]] or [error["error"] for error in run["errors"]]
        return "; ".join(dict.fromkeys(ends))
    failed, deciding = failures(run), [c for c in run["checks"] + run["comparisons"] if c.get("decides", True)]
    if failed:
        names = ", ".join(claim_name(claim) for claim in failed[:4]) + (", ..." if len(failed) > 4 else "")
        return f"{len(failed)} of {len(deciding)} checks failed: {names}"
    if run["errors"]:
        return str(run["errors"][0]["error"])
    passed = f"{counted(len(deciding), 'checks')} passed"
    passed += "".join(f" · without rank {lost['rank']}" for lost in run["lost"])  # the remaining ranks continued
    return passed if run["proven"] or run["run_mode"] == SCRIPT else f"not proven · {passed}"


def load_sentence(machine: Run) -> str:
    """Return the ranks, the cores, the other load, and what this means for the times."""
    num_ranks, cores = len(machine["ranks"]), machine["cores"]
    others = others_runnable(machine)
    shares = f"{counted(num_ranks, 'ranks')} on {counted(cores, 'cores')}"
    load = f"{shares}, {'unknown' if others is None else others} other runnable thread{'s' * (others != 1)}"
    return f"{load}: {'compare bytes, not times' if is_crowded(machine) else 'each rank had a core for itself'}"


def others_runnable(machine: Run) -> int | None:
    """Return the most threads besides the ranks that were runnable at start or end; None if unknown."""
    seen = [machine[moment]["runnable"] for moment in ("start", "end") if machine[moment]]
    known = [count for count in seen if count is not None]
    return max(0, max(known) - len(machine["ranks"]) + 1) if known else None


def is_crowded(machine: Run) -> bool:
    """Return whether ranks had to wait for a core: their times then depend on the machine too."""
    return bool(len(machine["ranks"]) + (others_runnable(machine) or 0) > machine["cores"])


def failures(run: Run) -> list[Run]:
    """Return the checks and comparisons that failed."""
    return [claim for claim in run["checks"] + run["comparisons"] if not claim["passed"]]


def failure_sentence(claim: Run) -> str:
    """Return expected and observed."""
    if claim.get("unit") == FINDINGS:
        return f"{claim_name(claim)}: {claim['detail']}"
    detail = f" ({claim['detail']})" if claim.get("detail") else ""
    return f"{claim_name(claim)}: {_error_size(claim)}{detail}"


def _error_size(claim: Run) -> str:
    """Return the size of a claim's error."""
    if "max_abs_diff" in claim:
        return f"differs by {difference(claim['max_abs_diff'])}, but only {allowed(claim)} is allowed"
    predicted, measured, bound = (quantity(claim[key], claim["unit"]) for key in ("predicted", "measured", "tolerance"))
    return f"predicted {predicted} ± {bound}, rank {claim['rank']} measured {measured}"


def claim_name(claim: Run) -> str:
    """Return the variant and the check, such as "bucketed gradients"; for a failed check of findings, the fault."""
    failed = claim.get("unit") == FINDINGS and not claim["passed"]
    name = WHEN_FAILED.get(claim["name"], claim["name"]) if failed else claim["name"]
    return f"{claim['variant']} {name}".strip()


def lost_sentence(lost: Run) -> str:
    """Return which rank is lost, when and why."""
    step = "" if lost["step"] is None else f" at step {lost['step']}"
    return f"rank {lost['rank']} lost{step}: {lost['reason']}"


def dropped_sentence(run: Run) -> str:
    """Return how many messages were rejected, why, and from which addresses."""
    dropped = run["dropped"]
    faults = ", ".join(f"{count} {fault}" for fault, count in dropped["by_fault"].items())
    sources = ", ".join(f"{source} ({count})" for source, count in dropped["by_source"].items())
    return f"rejected {dropped['messages']} unauthenticated messages: {faults}; from {sources}"


def unseen_sentence(run: Run) -> str:
    """Return the ranks whose records are missing from the verdict, and where these are."""
    hosts = {each["rank"]: each["host"] for each in run["unseen"]}
    who = ", ".join(f"rank {rank} (on {host})" if host else f"rank {rank}" for rank, host in hosts.items())
    elsewhere = any(hosts.values())
    why = "their records are on that host, not here" if elsewhere else "they ended before they wrote any"
    return f"no records of {who}: {why}; this verdict has none of their measurements and checks"


def error_sentences(run: Run) -> list[str]:
    """Return the errors that ended ranks, one line for all with the same."""
    by_error: dict[tuple[int, str], list[int]] = {}
    for error in run["errors"]:
        by_error.setdefault((error["exit_code"], error["error"]), []).append(error["rank"])
    return [
        f"{name_ranks(ranks)} ended with code {exit_code}: {error}" for (exit_code, error), ranks in by_error.items()
    ]


# Lines of rank 0's log outside its tables: the first word, and the sentence.

MOST_NAMED = 8  # checks
MOST_FAILED = 4  # failed checks with a sentence in a normal log; the report has all
LogLines = Iterator[tuple[str, str]]


def skipped(run: Run, by_name: int = 3) -> LogLines:
    """Yield the variants that these settings exclude, with reasons, or only their names if many."""
    left_out = run["skipped"]
    if by_name and len(left_out) >= by_name:
        names = ", ".join(skip["variant"] for skip in left_out)
        yield "skipped", f"these settings rule out {len(left_out)} variants (the report has the reasons): {names}"
    else:
        yield from (("skipped", f"{skip['variant']}: {skip['reason']}") for skip in left_out)


def failed(run: Run) -> LogLines:
    """Yield the failed checks."""
    yield from (("FAILED", failure_sentence(claim)) for claim in failures(run))


def first_failures(run: Run) -> LogLines:
    """Yield the first failed checks, and where to find the others."""
    found = failures(run)
    yield from list(failed(run))[:MOST_FAILED]
    if len(found) > MOST_FAILED:
        yield "", f"and {len(found) - MOST_FAILED} more: the report has all"
    if found and not run["mistake"]:
        yield "read", where_to_read(run, found[0])


def where_to_read(run: Run, claim: Run) -> str:
    """Return for a failed check: the variant's file, the command to run it alone, and the bug that makes it fail."""
    variant, mode = claim["variant"], run["run_mode"]
    place = variant.rpartition(":")[0] or (mode if is_path(mode) else f"experiments/{mode}/")
    command = f"; LAB_VARIANT={variant} runs it alone" if variant else ""
    bug = f"; {claim['control']} makes this check fail on purpose" if claim["control"].startswith("LAB_BUG=") else ""
    return f"{place}{command}{bug}"


def single_rank(run: Run) -> LogLines:
    """Yield why the table of a single rank has no bytes."""
    if run["world_size"] == 1:
        yield "alone", "WORLD_SIZE=1: there is nothing to communicate"


def times(run: Run) -> LogLines:
    """Yield how reliable the times are: for each machine, its ranks, cores and other load."""
    if times_steps(run):
        yield from (("times", load_sentence(machine)) for machine in run["machines"])


def deciding_checks(run: Run) -> LogLines:
    """Yield the names of the deciding checks, for a mode without timed steps, since its table lacks them."""
    names = list(dict.fromkeys(check["name"] for check in run["checks"]))
    if names and not times_steps(run):
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        yield "decided by", ", ".join(names[:MOST_NAMED]) + more


def troubles(run: Run) -> LogLines:
    """Yield other events: injected faults, rejected messages, errors, lost ranks and missing records."""
    yield from (("fault", fault_sentence(each)) for each in run.get("drills", []))
    if run.get("dropped"):
        yield "dropped", dropped_sentence(run)
    yield from (("error", sentence) for sentence in error_sentences(run))
    yield from (("lost", lost_sentence(lost)) for lost in run["lost"])
    if run["unseen"]:
        yield "unseen", unseen_sentence(run)


def error_logs(run: Run, report: Path | None) -> LogLines:
    """Yield the log of each rank that ended with an error."""
    logs = [f"rank{error['rank']}.log" for error in run["errors"]]
    if logs and report:
        yield "read", f"{', '.join(logs)} in {report.parent}"


def ending(run: Run, records: Ranks, report: Path | None) -> LogLines:
    """Yield the verdict, the report's path, and the command to repeat the run."""
    why = [explanation(run)] if run["mistake"] else []
    yield run["verdict"].upper(), " · ".join([headline(run), *why])
    yield "report", str(report) if report else "none was written"
    yield "rerun", repeat_command(records)


def lost_lines(run: Run, records: Ranks, report: Path | None, folder: Path) -> LogLines:
    """Yield for a broken cluster where to read on, the report's path, and the command to repeat the run."""
    if logs := ", ".join(f"rank{lost['rank']}.log" for lost in run["lost"]):
        yield "read", f"the last lines of {logs} in {folder}"
    if report:
        yield "report", str(report)
    yield "rerun", repeat_command(records)


def mistake_sentence(run: Run) -> str:
    """Return the injected bug, and the check that must catch it."""
    mistake = run["mistake"]
    return f"LAB_BUG={mistake['name']}: {mistake['what']}; the check that catches it: {mistake['check']}"


def caught_sentence(run: Run) -> str:
    """Return whether that check caught it: the failed claims and their errors, or why not."""
    check = run["mistake"]["check"]
    found = [claim for claim in failures(run) if claim["name"] == check]
    if found:
        names, which = ", ".join(claim_name(claim) for claim in found), "the first " if len(found) > 1 else ""
        return f"caught by {names}: {which}{_error_size(found[0])}"
    return f"not caught: the {check} check {missed(run)}"


def explanation(run: Run) -> str:
    """Return the last line's part on the injected bug: whether its check caught it, by the first failed claim."""
    mistake = run["mistake"]
    found = next((claim for claim in failures(run) if claim["name"] == mistake["check"]), None)
    seen = f"caught by {claim_name(found)}, as expected: {_error_size(found)}" if found else caught_sentence(run)
    return f"LAB_BUG={mistake['name']}: {mistake['what']}; {seen}"


def missed(run: Run) -> str:
    """Return how the bug's check missed it; empty if it failed, as expected."""
    check = run["mistake"]["check"]
    results = [claim["passed"] for claim in run["checks"] + run["comparisons"] if claim["name"] == check]
    if not results:
        return "did not run: nothing in this run could detect it"
    return "passed: nothing in this run detects it" if all(results) else ""


def proof_note(run: Run) -> str:
    """Return why a run that did not fail is still not proven; empty if it is."""
    if run["proven"] or run["verdict"] != "pass" or run["run_mode"] == SCRIPT:
        return ""
    return "not proven: no check was made" if not run["checks"] else "not proven: LAB_PROOF=0 skips the proof"


def repeat_command(records: Ranks) -> str:
    """Return the command that repeats the run, in the way it was started."""
    start = first(records)
    started_by = start.started_by or (COMPOSE if start.world_size <= ON_ONE_MACHINE else EACH_RANK)
    settings = [f"{name}={shlex.quote(value)}" for name, value in start.repeat.items()]
    if start.run_mode in (SCRIPT, PROOF):
        return " ".join([*settings, "./run" if started_by == "./run" else "distlab", start.run_mode, start.title])
    if started_by in (COMPOSE, "./run", "make run") and start.repeat.keys() & {"LAB_NET_RATE", "LAB_NET_DELAY"}:
        settings.append("COMPOSE_FILE=docker-compose.yaml:compose/net.yaml")
    return " ".join([*settings, started_by])
