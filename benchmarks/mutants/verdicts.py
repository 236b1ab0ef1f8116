"""What judges a run, and what it judges: claims that vanish, verdicts, checkpoints."""

from benchmarks.mutants import Mutant

FLAT = "RUN_MODE=dp LAB_MODEL=mlp LAB_VARIANT=flat"
AUDITED = FLAT + " LAB_AUDIT_EVERY=1"
SAVED = FLAT + " LAB_CHECKPOINT_EVERY=1 LAB_CHECKPOINT_KEEP=2"
BESIDE = SAVED + " LAB_CHECKPOINT_ASYNC=1"
BIG = FLAT + " LAB_CHECKPOINT_EVERY=2 LAB_WIDTH=768 LAB_PROOF=0"
RESUMED = SAVED + " LAB_RUN_ID=again then " + SAVED + " LAB_RUN_ID=again LAB_RESUME=auto LAB_STEPS=6"

HOLDING, PROOF, CORRUPTION = "distlab/verify/audit.py", "distlab/verify/proof.py", "distlab/verify/silent_corruption.py"
JUDGE, END = "distlab/report/verdict.py", "distlab/rank/finish.py"
EXPECTED, SAVER, FINDING = "distlab/report/verdict.py", "distlab/checkpoint/save.py", "distlab/checkpoint/locate.py"

VANISHED = [
    Mutant(
        HOLDING,
        '            self.lab.check("timed losses", *off[:2], name, off.where, control=CONTROLS["losses"])\n',
        '            if off.share > 1:\n                self.lab.check("timed losses", *off[:2], name)\n',
        FLAT,
    ),
    Mutant(CORRUPTION, "return self.every is not None and (", "return self.every is None and (", AUDITED),
    Mutant(
        "distlab/config/__init__.py",
        "return self.audit_every or (1 if flips else None)",
        "return 1 if flips else None",
        AUDITED,
    ),
    Mutant(
        PROOF,
        "    for check, off in found.found.items():",
        "    for check, off in ():",
        FLAT,
    ),
    Mutant(PROOF, 'found.note("losses", abs(', 'found.note("weights", abs(', FLAT),
    Mutant(PROOF, "    if also is not None and not is_own(name):", "    if also is not None and is_own(name):", FLAT),
    Mutant(
        HOLDING,
        "if lab.config.proof and kind in NAMES and name not",
        "if lab.config.proof and kind in NAMES and name",
        FLAT,
    ),
    Mutant(HOLDING, "if self.held[name].replicas and name not in", "if self.held[name].replicas and name in", FLAT),
    Mutant(
        "distlab/lab.py",
        'seen = {"called bytes": (round(predicted, 3), round(traffic.called_bytes, 3), 0.0)}',
        "seen: dict[str, tuple[float, float, float]] = {}",
        FLAT,
    ),
    Mutant(
        "distlab/lab.py",
        'if prediction.variant in measured and prediction.name == "rest bytes":',
        'if prediction.variant in measured and prediction.name == "bytes at rest":',
        FLAT,
    ),
    Mutant(
        "distlab/verify/records.py",
        "    for name, sent in drawn.items():\n        traffic, shown",
        "    for name, sent in ():\n        traffic, shown",
        FLAT,
    ),
    Mutant(
        "distlab/rank/meter_self_test.py",
        '    if lab.world_size == 1:\n        lab.say("one rank',
        '    if lab.world_size <= 3:\n        lab.say("one rank',
        FLAT,
    ),
    Mutant("distlab/rank/main.py", "        check_verdicts(lab)\n", "", FLAT),
    Mutant(
        "experiments/dp/checks.py",
        "        if name in EARLY and shows and not silent:",
        "        if name in EARLY and not (shows or silent):",
        "RUN_MODE=dp LAB_MODEL=mlp LAB_VARIANT=bucketed",
    ),
    Mutant(
        "experiments/dp/__init__.py",
        "    if lab.config.proof:\n        check_samples(lab)",
        "    if not lab.config.proof:\n        check_samples(lab)",
        FLAT,
    ),
    Mutant(
        "experiments/pp/checks.py",
        "    if done:\n",
        "    if not done:\n",
        "RUN_MODE=pp WORLD_SIZE=2 LAB_MODEL=mlp LAB_MICROBATCHES=4 LAB_VARIANT=1f1b",
    ),
    Mutant(
        "distlab/verify/counted.py",
        "    if held is None:\n",
        "    if held is not None:\n",
        "RUN_MODE=pp WORLD_SIZE=2 LAB_MODEL=mlp LAB_MICROBATCHES=4 LAB_VARIANT=1f1b",
    ),
    Mutant(
        "experiments/fsdp/checks.py",
        "    if name in AHEAD:\n",
        "    if name not in AHEAD:\n",
        "RUN_MODE=fsdp LAB_MODEL=mlp LAB_VARIANT=zero3",
    ),
    Mutant(
        "experiments/fsdp/checks.py",
        '    if lab.world_size > 1 and name != "dp":  # alone',
        '    if lab.world_size > 3 and name != "dp":  # alone',
        "RUN_MODE=fsdp LAB_MODEL=mlp LAB_VARIANT=zero3",
    ),
    Mutant(
        "experiments/moe/checks.py",
        "        if asked:\n",
        "        if not asked:\n",
        "RUN_MODE=moe LAB_MODEL=mlp WORLD_SIZE=2 LAB_VARIANT=ep",
    ),
    Mutant(
        "experiments/train/__init__.py",
        "    for epoch in range(EPOCHS):\n        shards = ",
        "    for epoch in range(1, EPOCHS):\n        shards = ",
        "RUN_MODE=train",
    ),
    Mutant(
        "experiments/comm/benchmark.py",
        "        if nbytes in COMPARED and cost.wire_bytes is not None:",
        "        if nbytes not in COMPARED and cost.wire_bytes is not None:",
        "RUN_MODE=comm LAB_SWEEP_MIB=1 LAB_VARIANT=ring",
    ),
    Mutant(
        "experiments/elastic/checks.py",
        "    hold_samples(lab, course)\n",
        "",
        "RUN_MODE=elastic LAB_MODEL=mlp LAB_VARIANT=shrink",
    ),
    Mutant(
        "experiments/precision/checks.py",
        "    if stored != dtype:\n",
        "    if stored == dtype:\n",
        "RUN_MODE=precision LAB_MODEL=mlp LAB_VARIANT=bf16_master",
    ),
    Mutant(
        "experiments/compress/reference.py",
        "    if method in CASTS:\n",
        "    if method not in CASTS and method in ():\n",
        "RUN_MODE=compress LAB_MODEL=mlp LAB_VARIANT=fp16",
    ),
]

VERDICTS = [
    Mutant(JUDGE, "if key not in merged or _excess(check) > _excess(merged[key]):", "if True:", FLAT),
    Mutant(JUDGE, "if key not in merged or _excess(check) > _excess(merged[key]):", "if key not in merged:", FLAT),
    Mutant(JUDGE, "if key not in merged or _farness(entry) > _farness(merged[key][1]):", "if True:", FLAT),
    Mutant(
        JUDGE,
        "return math.isfinite(difference) and abs(difference)",
        "return not abs(difference) > tolerance or abs(difference)",
        FLAT,
    ),
    Mutant(JUDGE, "and abs(difference) <= tolerance", "and difference <= tolerance", FLAT),
    Mutant(JUDGE, "return not claim.decides or _within(", "return _within(", FLAT),
    Mutant(
        JUDGE,
        "_within(abs(claim.measured - claim.predicted), claim.tolerance)",
        "_within(claim.measured - claim.predicted - claim.tolerance, claim.tolerance)",
        FLAT,
    ),
    Mutant(END, 'if drill["held"] is False:', 'if drill["held"] is None:', FLAT),
    Mutant(
        END,
        'if run["mistake"] and run["verdict"] != "lost" and (how := missed(run)):',
        'if run["mistake"] and run["verdict"] == "lost" and (how := missed(run)):',
        FLAT,
    ),
    Mutant(
        JUDGE,
        "if any(code != 3 and code < 128 for code in codes):",
        "if any(code != 3 and code > 128 for code in codes):",
        FLAT,
    ),
    Mutant(JUDGE, "if lost or codes:  #", "if lost and codes:  #", FLAT),
    Mutant(JUDGE, 'return "pass" if held else "fail"', 'return "pass"', FLAT),
    Mutant(JUDGE, 'EXIT_CODES = {"pass": 0, "fail": 1,', 'EXIT_CODES = {"pass": 0, "fail": 0,', FLAT),
    Mutant(
        JUDGE,
        "    if start.says_claims and not errors and not lost:",
        "    if not start.says_claims and not errors and not lost:",
        FLAT,
    ),
    Mutant(JUDGE, "if rank not in ended and rank not in left]", "if rank in ended and rank not in left]", FLAT),
    Mutant(EXPECTED, "if made[rank, variant, name] < times]", "if made[rank, variant, name] < 0]", FLAT),
    Mutant(
        EXPECTED, "            lacking = lacking if all(made", "            lacking = lacking if not all(made", FLAT
    ),
    Mutant("distlab/report/fault_checks.py", "return bool(right) and right_rank, ", "return bool(found), ", FLAT),
    Mutant("distlab/rank/main.py", "        says_claims=True,\n", "", FLAT),
]

CHECKPOINTS = [
    Mutant(
        SAVER, "state = {name: storage.cloned(held) for name, held in state.items()}", "state = dict(state)", BESIDE
    ),
    Mutant(
        "distlab/checkpoint/storage.py",
        'return held.detach().to("cpu", copy=True) if is_whole(held)',
        'return held.detach().to("cpu") if is_whole(held)',
        BESIDE,
    ),
    Mutant(FINDING, "return sorted(named, key=step_of, reverse=True)", "return sorted(named, key=step_of)", SAVED),
    Mutant(
        FINDING,
        "    for folder in candidates(source):\n        held = lock_for_reading(folder)",
        "    for folder in reversed(candidates(source)):\n        held = lock_for_reading(folder)",
        RESUMED,
    ),
    Mutant(
        SAVER,
        "for path in locate.candidates(folder)[count:]:",
        "for path in locate.candidates(folder)[count + 1 :]:",
        SAVED,
    ),
    Mutant(SAVER, "                    keep_last(self.folder, config.checkpoint_keep)\n", "", SAVED),
    Mutant(SAVER, "        outcome.held_s = time.perf_counter() - outcome.began_at\n", "", BIG),
    Mutant(
        SAVER,
        "        if (step + 1) % config.checkpoint_every:\n",
        "        if (step + 2) % config.checkpoint_every:\n",
        FLAT + " LAB_CHECKPOINT_EVERY=3 LAB_STEPS=6",
    ),
    Mutant(
        SAVER, '        lab.check("checkpoint", len(outcome.faults), 0, detail=detail, control=CONTROL)\n', "", SAVED
    ),
]

MUTANTS = [*VANISHED, *VERDICTS, *CHECKPOINTS]
