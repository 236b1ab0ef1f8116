"""What is measured: seconds, bytes by class, samples a second, and what a picture or a table says of them."""

from benchmarks.mutants import Mutant

DP = "RUN_MODE=dp LAB_MODEL=mlp LAB_VARIANT=flat"
GPT = "RUN_MODE=dp LAB_VARIANT=flat LAB_OPTIMIZER=adamw"
SERVER = "RUN_MODE=server LAB_MODEL=mlp LAB_LOCAL_STEPS=2 LAB_VARIANT="
PP = "RUN_MODE=pp LAB_MODEL=mlp LAB_DEPTH=3 LAB_VARIANT=1f1b"
MOE = "RUN_MODE=moe LAB_MODEL=mlp LAB_BATCH=25 LAB_EXPERTS=5 LAB_VARIANT=ep"
COMM = "RUN_MODE=comm LAB_SWEEP_MIB=0.25 LAB_VARIANT=ring"
ELASTIC = "RUN_MODE=elastic LAB_MODEL=mlp LAB_STEPS=6 LAB_VARIANT=shrink"
PURPOSES = MEMORY = "distlab/measure/memory.py"
STORAGES = ACTIVATIONS = "distlab/measure/storages.py"
LAP = "distlab/measure/timeline.py"
TIMED, TIMELINE = "distlab/verify/timed.py", "distlab/verify/records.py"
SPANS, JUDGE = "distlab/measure/timeline.py", "distlab/report/verdict.py"

MUTANTS = [
    # Memory by class.
    Mutant(PURPOSES, 'yield parameter.grad, "gradients"', "yield parameter.grad, SAVED", DP),
    Mutant(PURPOSES, 'lambda gradient: add(gradient, "gradients")', "lambda gradient: add(gradient, SAVED)", DP),
    Mutant(PURPOSES, 'yield from ((value, "optimizer")', 'yield from ((value, "parameters")', GPT),
    Mutant(PURPOSES, "parameter.itemsize > self._model_itemsize", "parameter.itemsize >= self._model_itemsize", DP),
    Mutant(
        PURPOSES,
        'return "activations" if label == SAVED else label',
        "return label if label in CLASSES else COMMUNICATION",
        DP,
    ),
    Mutant(STORAGES, "self.add(tensor, *[COMMUNICATION] * calls)", "self.add(tensor)", DP),
    Mutant(MEMORY, "if self._began < moment <= self._ended:", "if self._began < moment <= self._began:", DP),
    Mutant(MEMORY, "return self._held(self._rested)", "return self._held(self._ended)", DP),
    Mutant(
        ACTIVATIONS, "self.peak_bytes = max(self.peak_bytes, self.live_bytes)", "self.peak_bytes = self.live_bytes", DP
    ),
    Mutant(
        ACTIVATIONS, "if not self._holders[key]:\n            self._nbytes", "if True:\n            self._nbytes", DP
    ),
    # Seconds.
    Mutant(LAP, "self.cpu_s = time.process_time() - self._busy_s", "self.cpu_s = time.process_time()", DP),
    Mutant(LAP, "self._busy_s = time.process_time()", "self._busy_s = time.thread_time() / 2", DP),
    Mutant(LAP, "return self.ended_s - self.began_s", "return self.cpu_s", DP),
    Mutant(TIMED, "[lap.cpu_s for lap in kept]", "[lap.wall_s for lap in kept]", DP),
    Mutant(TIMED, "[lap.wall_s for lap in kept]", "[lap.cpu_s / 2 for lap in kept]", DP),
    Mutant(TIMED, "kept = laps[WARMUP_STEPS:] if len(laps) > WARMUP_STEPS else laps", "kept = laps", DP),
    Mutant(TIMED, "kept = laps[WARMUP_STEPS:] if", "kept = laps[:-WARMUP_STEPS] if", DP),
    Mutant(
        TIMED,
        "share = strategy.backward(microbatches)",
        "share = strategy.backward(lab.dealt(course.batches, course.data_step(step)))",
        DP,
    ),
    Mutant(TIMED, "self.laps[name].append(lap)", "self.laps[name].append(around)", DP),
    Mutant(TIMELINE, "median(each[kind] for each in profiles)", "max(each[kind] for each in profiles)", DP),
    Mutant(TIMELINE, "median(each[kind] for each in profiles)", "profiles[-1][kind]", DP),
    Mutant(
        SPANS,
        "seconds[CLASSES[around[-1][0]]] -= min(end, around[-1][3]) - start",
        "seconds[CLASSES[around[-1][0]]] -= 0 * start",
        DP,
    ),
    Mutant(SPANS, '"input": "backward", "weight": "backward"', '"input": "backward", "weight": "optimizer"', PP),
    Mutant(SPANS, "return 1 - sum(map(length, busy)) / (len(busy)", "return 1 - sum(map(length, busy)) / (1", DP),
    Mutant(SPANS, "length(one) + length(other) - length", "length(one) - length", DP),
    Mutant(
        JUDGE,
        "return max((value for value in seconds if value is not None), default=None)",
        "return next((value for value in seconds if value is not None), None)",
        DP,
    ),
    Mutant(JUDGE, "lambda steps: steps.step_seconds, median)", "lambda steps: steps.step_seconds, max)", DP),
    Mutant(
        JUDGE,
        '"cpu_seconds": a_rank(Steps, lambda steps: steps.cpu_seconds',
        '"cpu_seconds": a_rank(Steps, lambda steps: steps.step_seconds',
        DP,
    ),
    Mutant("distlab/report/timeline.py", '"weight", "optimizer")', '"weight", "waiting")', DP),
    # Bandwidth.
    Mutant(
        "experiments/comm/benchmark.py",
        '("MB/s", 1e6) if nbytes < SMALL else ("GB/s", 1e9)',
        '("MB/s", 1e6) if nbytes < SMALL else ("GB/s", 2**30)',
        COMM,
    ),
    Mutant(
        "experiments/comm/benchmark.py", "factor * nbytes / seconds / 1e9", "factor * nbytes / seconds / 2**30", COMM
    ),
    Mutant("experiments/comm/benchmark.py", "slowest = slowest_of(everyone)", "slowest = everyone[0]", COMM),
    Mutant("distlab/collectives/costs.py", "[max(of_stretch) for", "[of_stretch[0] for", COMM),
    Mutant(
        "distlab/collectives/costs.py",
        'return 1.0 if op in ("broadcast", "reduce") else algorithmic_factor(op, world_size)',
        'return algorithmic_factor("all_reduce", world_size)',
        COMM,
    ),
    # Samples a second.
    Mutant(
        "experiments/server/asynchronous.py",
        "sum(samples) / max(walls)",
        "samples[walls.index(max(walls))] / max(walls)",
        SERVER + "dp",
    ),
    Mutant(
        "experiments/server/asynchronous.py", "sum(samples) / max(walls)", "sum(samples) / min(walls)", SERVER + "dp"
    ),
    Mutant(
        "experiments/server/asynchronous.py",
        "done / max(report.seconds for report in reports.values())",
        "done / max(report.compute_s for report in reports.values())",
        SERVER + "ssp",
    ),
    # Choices of experts.
    Mutant(
        "experiments/moe/checks.py",
        "dropped, asked = dropped + wanted - taken, asked + wanted",
        "dropped, asked = dropped + wanted - taken, asked + 2 * wanted - taken",
        MOE,
    ),
    Mutant(
        "experiments/moe/checks.py",
        "wanted = sum(sum(of_choice) for routed in layers for of_choice in routed.wanted[rank])",
        "wanted = sum(2 * sum(map(sum, routed.wanted[rank])) - sum(routed.admitted[rank]) for routed in layers)",
        MOE,
    ),
    # A change of members.
    Mutant(
        "experiments/elastic/checks.py",
        "in_ms(event.next_step_at, event), round",
        "round(1000 * (event.next_step_at - event.agreed_at), 1), round",
        ELASTIC,
    ),
    Mutant(
        "experiments/elastic/recovery.py",
        "why, began_at, met_at, time.time(), 0.0,",
        "why, time.time(), met_at, time.time(), 0.0,",
        ELASTIC,
    ),
]
