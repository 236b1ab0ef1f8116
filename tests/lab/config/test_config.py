"""The environment becomes one Config, or all its faults at once."""

import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from distlab.lab.cluster.admission import claim_of
from distlab.lab.config import Config, ConfigError, settings
from distlab.lab.config.settings import GONE, Field, ModeOptions, aliases, declared, modes
from distlab.lab.config.variables import BEGIN, END, NOT_PASSED_ON, compose_lines, main, names, table
from distlab.lab.rank.mode_loader import load
from distlab.lab.rank.preflight import refuse

RANK_OF_FOUR = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "worker0"}


def faults(**environ: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        Config.read(environ)
    return refused.value.faults


def test_defaults_are_those_of_the_stable_interface() -> None:
    config = Config.read({})
    assert (config.run_mode, config.world_size, config.master_port) == ("dp", 4, 29500)
    assert (config.model, config.width, config.depth, config.heads, config.seq) == ("gpt", 128, 4, 8, 64)
    assert (config.steps, config.batch, config.num_microbatches, config.dtype) == (20, 16, 1, "float32")
    assert (config.join_timeout_s, config.lost_after_s, config.collective_timeout_s) == (60, 2.5, 300)


def test_a_key_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert faults(LAB_KEY_FILE=str(path)) == [f"LAB_KEY_FILE={str(path)!r} is not a file"]
    path.write_text("short")
    assert faults(LAB_KEY_FILE=str(path)) == [
        f"LAB_KEY_FILE={str(path)!r} has 5 characters, too few for a key: expected at least 16"
    ]
    path.write_text("0123456789abcdef\n")
    config = Config.read(RANK_OF_FOUR | {"LAB_KEY_FILE": str(path)})
    assert config.key_file == path
    assert "LAB_KEY_FILE" not in config.environ() | config.written()


def test_a_key_file_without_contents_is_refused_at_once() -> None:
    """Reading /proc/kmsg waits for the next message of the kernel."""
    sentence = "LAB_KEY_FILE='/proc/kmsg' has 0 characters, too few for a key: expected at least 16"
    assert faults(LAB_KEY_FILE="/proc/kmsg") == [sentence]


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LAB_STEPS", "LAB_SLOW_RANK"])
def test_a_number_of_thousands_of_digits_is_refused_in_a_short_sentence(name: str) -> None:
    (fault,) = faults(**{name: "9" * 5000})
    assert fault.startswith(f"{name}=") and len(fault) < 500


def test_a_long_refused_value_is_shortened() -> None:
    config = Config.read({"RUN_MODE": "mesh", "LAB_MESH": "dp" + "9" * 5000})
    with pytest.raises(ConfigError) as refused:
        refuse(config, load("mesh"))
    assert all(len(fault) < 500 for fault in refused.value.faults)


def test_a_key_is_shown_nowhere() -> None:
    """Not in records, nor in the command that repeats the run, nor in messages to other ranks, nor in an error."""
    key = "a long secret of ours"
    config = Config.read(RANK_OF_FOUR | {"LAB_KEY": key, "LAB_STEPS": "7"})
    assert config.key is not None
    assert config.key.get_secret_value() == key
    found = [config.environ(), config.written(), config, claim_of(config, "v1", "")]
    assert not any("secret" in str(each) or "LAB_KEY" in str(each) for each in found)
    assert faults(LAB_KEY="short secret") == [
        "LAB_KEY=(not shown) is too short for a key: expected at least 16 characters"
    ]
    assert faults(LAB_KEY=f"\x07{key}") == ["LAB_KEY=(not shown) is not printable text in UTF-8"]


def test_empty_counts_as_unset() -> None:
    assert Config.read({"LAB_STEPS": "", "LAB_CLIP": " ", "WORLD_SIZE": ""}) == Config.read({})


def test_values_get_their_types() -> None:
    config = Config.read(RANK_OF_FOUR | {"LAB_VARIANT": "naive, ring", "LAB_PROOF": "0", "LAB_LR": "1e-3"})
    assert config.rank == 1
    assert config.variant == ("naive", "ring")
    assert config.proof is False
    assert config.learning_rate == 1e-3


def test_the_variables_that_were_set_repeat_the_run() -> None:
    environ = RANK_OF_FOUR | {"LAB_VARIANT": "naive,ring", "LAB_PROOF": "0", "LAB_STEPS": "7"}
    assert Config.read(environ).environ() == environ


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "9"}, "WORLD_SIZE='9' is out of range: expected 1 to 8"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is out of range: expected 1 to 1024"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc' is not a whole number"),
        ({"RUN_MODE": "trian"}, "RUN_MODE='trian' is not a mode (did you mean 'train'?)"),
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "x"}, "RANK=4 is outside of WORLD_SIZE=4, allowed: 0 to 3"),
        ({"MASTER_ADDR": "worker0"}, "MASTER_ADDR='worker0' is set and RANK is not"),
        ({"RANK": "0"}, "RANK=0 is set and MASTER_ADDR is not"),
        ({"WORLD_SIZ": "3"}, "WORLD_SIZ is not a variable of the lab (did you mean 'WORLD_SIZE'?)"),
        ({"RUNMODE": "tp"}, "RUNMODE is not a variable of the lab (did you mean 'RUN_MODE'?)"),
        ({"LAB_STEP": "5"}, "LAB_STEP is not a variable of the lab (did you mean 'LAB_STEPS'?)"),
        *(({name: "0"}, f"{name}: {GONE[name]}") for name in GONE if name.isupper()),
        ({"LAB_MODEL": "gtp"}, "LAB_MODEL='gtp' is not one of line, mlp, gpt (did you mean 'gpt'?)"),
        ({"LAB_PROOF": "maybe"}, "LAB_PROOF='maybe' is neither 0 nor 1"),
        ({"LAB_LR": "nan"}, "LAB_LR='nan' is not a number"),
        ({"LAB_LR": "0"}, "LAB_LR='0' is out of range: expected more than 0, up to 1000"),
        ({"LAB_RUN_ID": "a/b"}, "LAB_RUN_ID='a/b' is not a run id"),
        ({"LAB_RUN_ID": ".."}, "LAB_RUN_ID='..' is not a run id"),
        ({"LAB_MEMORY": "much"}, "LAB_MEMORY='much' is not a size such as 900m or 2g"),
        ({"LAB_BACKEND": "nccl", "LAB_DEVICE": "cpu"}, "LAB_BACKEND=nccl works only with LAB_DEVICE=cuda"),
        ({"LAB_NET_RATE": "fast"}, "LAB_NET_RATE='fast' is not a rate such as 500kbit, 100mbit or 2gbit"),
        ({"LAB_NET_RATE": "0mbit"}, "LAB_NET_RATE='0mbit' would let nothing through"),
        ({"LAB_NET_DELAY": "5"}, "LAB_NET_DELAY='5' is not a delay such as 500us, 5ms or 1s"),
        ({"LAB_SLOW_RANK": "2"}, "LAB_SLOW_RANK='2' is not a rank and its share of speed, such as 2:0.5"),
        (
            {"LAB_SLOW_RANK": "2:0"},
            "LAB_SLOW_RANK='2:0' has a speed that is out of range: expected more than 0, up to 1",
        ),
        ({"LAB_SLOW_RANK": "4:0.5"}, "LAB_SLOW_RANK='4:0.5' names a rank outside of WORLD_SIZE=4, allowed: 0 to 3"),
        ({"RUN_MODE": "compress", "LAB_RATIO": "0"}, "LAB_RATIO='0' is out of range: expected more than 0, up to 1"),
        (
            {"RUN_MODE": "compress", "LAB_RATIO": "1.5"},
            "LAB_RATIO='1.5' is out of range: expected more than 0, up to 1",
        ),
        ({"RUN_MODE": "server", "LAB_STALENESS": "-1"}, "LAB_STALENESS='-1' is out of range: expected 0 to 10000"),
        ({"RUN_MODE": "server", "LAB_LOCAL_STEPS": "0"}, "LAB_LOCAL_STEPS='0' is out of range: expected 1 to 10000"),
        ({"RUN_MODE": "compress", "LAB_LOW_RANK": "0"}, "LAB_LOW_RANK='0' is out of range: expected 1 to 1000000000"),
        ({"LAB_DEPTH": "1000000000"}, "LAB_DEPTH='1000000000' is out of range: expected 1 to 1000"),
        ({"LAB_WIDTH": "1000000000"}, "LAB_WIDTH='1000000000' is out of range: expected 1 to 1000000"),
        ({"LAB_SEQ": "1000000000"}, "LAB_SEQ='1000000000' is out of range: expected 1 to 1000000"),
        ({"LAB_BATCH": "1000000000"}, "LAB_BATCH='1000000000' is out of range: expected 1 to 1000000"),
        ({"LAB_RATIO": "0.1"}, "LAB_RATIO='0.1' belongs to RUN_MODE=compress: dp has no such setting"),
        (
            {"RUN_MODE": "mine/absent.py"},
            "RUN_MODE='mine/absent.py' does not exist: expected a Python file, or a folder",
        ),
    ],
)
def test_each_fault_is_one_sentence(environ: dict[str, str], words: str) -> None:
    found = faults(**environ)
    assert len(found) == 1
    assert found[0].startswith(words)


NOT_UTF8 = b"\xff\xfe".decode(errors="surrogateescape")
HOSTILE = [
    "x" * 300, "x" * 6000, NOT_UTF8, "a\nb", "a\x01b", "\u202e", "-1", "0", "1000000000", "1" + "0" * 30, "9" * 5000,
    "1e308", "1e-308", "nan", "inf", "/proc", "/sys", "/dev/zero", "/dev/urandom", "\u0661\u0662", "+5", "0x10", "1_000",
    " 5 ", "[]", "null", "../..", "-", "--help", "~", ".",
]  # fmt: skip


@pytest.mark.parametrize("mode", modes())
def test_hostile_values_are_refused_with_one_sentence_each(mode: str) -> None:
    """Each sentence has at most a few lines, and only characters that a terminal can show."""
    names = {*aliases(Config), *aliases(declared(mode))} - {"RUN_MODE"}
    for value in HOSTILE:
        found = faults(**{"RUN_MODE": mode} | dict.fromkeys(names, value))
        assert all(fault.encode().decode().isprintable() and len(fault) < 400 for fault in found), value
        about = [name for name in names if any(fault.startswith(f"{name}=") for fault in found)]
        assert len(found) == len(about), value


@pytest.mark.parametrize("value", [NOT_UTF8, "a\nb", "a\x1b[2Jb", "\u202etxt"])
@pytest.mark.parametrize("name", ["LAB_RUNS_DIR", "LAB_STEPS", "LAB_VARIANT", "RUN_MODE"])
def test_unprintable_values_are_refused(name: str, value: str) -> None:
    assert faults(**{name: value}) == [f"{name}={value!r} is not printable text in UTF-8"]


def test_an_unprintable_name_is_escaped() -> None:
    assert faults(**{f"LAB_{NOT_UTF8}": "1"})[0].startswith(r"'LAB_\udcff\udcfe' is not a variable of the lab")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"LAB_SEED": "1" + "0" * 30}, "is out of range: expected 0 to 4294967295"),
        ({"LAB_LR": "1e308"}, "LAB_LR='1e308' is out of range: expected more than 0, up to 1000"),
        ({"LAB_COLLECTIVE_TIMEOUT_S": "1e308"}, "LAB_COLLECTIVE_TIMEOUT_S='1e308' is out of range"),
        ({"LAB_WIDTH": "9" * 5000}, f"LAB_WIDTH='{'9' * 120}...' (5000 letters) is out of range"),
        ({"LAB_RUN_ID": "x" * 256}, "is too long for the name of a folder: allowed are up to 200 bytes"),
        ({"MASTER_ADDR": "x" * 64, "RANK": "0"}, "is not the name or the address of a host"),
        ({"RUN_MODE": "/" + "x" * 6000}, "does not exist: expected a Python file"),
        ({"LAB_SLOW_RANK": "9" * 5000 + ":1"}, "is not a rank and its share of speed"),
    ],
)
def test_values_out_of_every_range_are_refused(environ: dict[str, str], words: str) -> None:
    found = faults(**environ)
    assert len(found) == 1
    assert words in found[0]


def test_a_mode_that_is_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    assert "does not exist" in faults(RUN_MODE=str(tmp_path / "pipe.py"))[0]


def test_a_modes_default_sizes_apply_unless_set() -> None:
    config = Config.read({"RUN_MODE": "compress", "LAB_DEPTH": "3"})
    assert (config.width, config.depth) == (64, 3)
    assert config.environ() == {"RUN_MODE": "compress", "LAB_DEPTH": "3"}
    assert Config.read({"RUN_MODE": "dp"}).width == 128


def test_only_the_named_rank_is_slow() -> None:
    slow = [Config.read(RANK_OF_FOUR | {"RANK": rank, "LAB_SLOW_RANK": "1:0.25"}).slowed_to for rank in "0123"]
    assert slow == [1.0, 0.25, 1.0, 1.0]


def test_all_faults_are_reported_at_once() -> None:
    found = faults(WORLD_SIZ="3", LAB_STEPZ="4")
    assert [sentence.split(" ", 1)[0] for sentence in found] == ["LAB_STEPZ", "WORLD_SIZ"]
    assert len(faults(WORLD_SIZE="9", RUN_MODE="tpp", LAB_STEP="5", LAB_MODEL="gtp", LAB_SEED="-1")) == 5


def test_a_large_world_needs_a_launcher() -> None:
    """Only a launcher that sets RANK, other than the Compose file, may start more than eight ranks."""
    rank = {"RANK": "63", "WORLD_SIZE": "64", "MASTER_ADDR": "node0"}
    assert Config.read(rank).world_size == 64
    assert faults(**rank | {"WORLD_SIZE": "1025"}) == ["WORLD_SIZE='1025' is out of range: expected 1 to 1024"]
    few = "WORLD_SIZE='64' is out of range: expected 1 to 8 on one machine, and up to 1024 under an engine such as"
    for on_one_machine in (rank | {"RANKS_ON_HOST": "64"}, {"WORLD_SIZE": "64"}):
        assert faults(**on_one_machine) == [f"{few} Slurm or torchrun"]


def test_the_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config.read({}).steps = 3  # type: ignore[misc]


def test_the_table_names_every_variable_once() -> None:
    """The variables of each mode too."""
    names = [row.split("`")[1] for row in table().splitlines() if row.startswith("| `")]
    own = [alias for mode in modes() for alias in aliases(declared(mode))]
    assert names == [*aliases(Config), *own]


OPTIONS = """
from typing import Literal
from distlab.lab.config.settings import Field, ModeOptions

class Options(ModeOptions):
    sizes = {"width": 24, "steps": 7}
    speed: float = Field(2.5, alias="LAB_SPEED", gt=0, description="how fast")
    kind: Literal["a", "b"] = Field("a", alias="LAB_KIND", description="which")
    keep: bool = Field(True, alias="LAB_KEEP", description="0: drop it")

    def untimed(self):
        return self.model_copy(update={"speed": 0.0})
"""


@pytest.fixture
def lesson(tmp_path: Path) -> str:
    """The path of a mode outside of experiments/, with its own sizes and variables."""
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / "__init__.py").write_text("import torch_is_not_imported_for_this")
    (tmp_path / "fast" / "options.py").write_text(OPTIONS)
    return str(tmp_path / "fast")


def test_a_lesson_elsewhere_has_its_own_variables_and_sizes(lesson: str) -> None:
    config = Config.read({"RUN_MODE": lesson, "LAB_SPEED": "3", "LAB_KEEP": "0", "LAB_STEPS": "9"})
    assert (config.width, config.steps, config.mode_name) == (24, 9, "fast")
    own: Any = config.options
    assert (own.speed, own.kind, own.keep) == (3.0, "a", False)
    assert (config.untimed().options.speed, own.speed) == (0.0, 3.0)  # type: ignore[attr-defined]
    assert config.environ() == {"RUN_MODE": lesson, "LAB_SPEED": "3.0", "LAB_KEEP": "0", "LAB_STEPS": "9"}
    assert config.written()["LAB_KIND"] == "a"


def test_a_lessons_own_class_types_its_variables(lesson: str) -> None:
    class Options(ModeOptions):
        speed: float = Field(2.5, alias="LAB_SPEED")
        kind: str = Field("a", alias="LAB_KIND")
        keep: bool = Field(True, alias="LAB_KEEP")

    config = Config.read({"RUN_MODE": lesson, "LAB_SPEED": "3"})
    assert config.own(Options) == Options(speed=3.0)
    assert config.own(Options).model_fields_set == {"speed"}
    assert config.with_own(speed=4.0).own(Options).speed == 4.0


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"LAB_SPEED": "0"}, "LAB_SPEED='0' is out of range: expected more than 0"),
        ({"LAB_KIND": "c"}, "LAB_KIND='c' is not one of a, b"),
        ({"LAB_SPED": "1"}, "LAB_SPED is not a variable of the lab (did you mean 'LAB_SPEED'?)"),
    ],
)
def test_a_lessons_own_variables_are_checked_like_all_others(
    lesson: str, environ: dict[str, str], sentence: str
) -> None:
    assert faults(RUN_MODE=lesson, **environ) == [sentence]


def test_a_lesson_gets_the_options_that_were_read(lesson: str) -> None:
    kind = type(Config.read({"RUN_MODE": lesson}).options)
    assert declared(lesson) is kind and sys.modules["fast.options"].Options is kind
    assert pickle.loads(pickle.dumps(Config.read({"RUN_MODE": "moe", "LAB_TOP_K": "1"}))).options.top_k == 1


@pytest.mark.parametrize(
    ("options", "why"), [("class Options(", "SyntaxError: "), ("", "AttributeError: module 'fast.options'")]
)
def test_options_that_cannot_be_imported_are_refused(lesson: str, options: str, why: str) -> None:
    Path(lesson, "options.py").write_text(options)
    (sentence,) = faults(RUN_MODE=lesson)
    assert sentence.startswith(f"RUN_MODE={lesson!r} has an options.py that cannot be imported: {why}")


def test_a_lesson_with_a_syntax_error_fails_at_its_import(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("class Options(\n")
    assert Config.read({"RUN_MODE": str(tmp_path / "broken.py")}).mode_name == "broken"
    assert faults(RUN_MODE=str(tmp_path / "broken-name.py"))[0].endswith(
        "does not exist: expected a Python file, or a folder with __init__.py in it"
    )


def test_the_compose_file_passes_on_the_variables_of_the_table() -> None:
    assert [line.strip(" :") for line in compose_lines().splitlines()[1:-1]] == [
        name for name in names() if name not in NOT_PASSED_ON
    ]


def test_a_compose_file_is_written_between_its_two_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "docker-compose.yaml"
    monkeypatch.setattr("distlab.lab.config.variables.COMPOSE_FILE", file)
    file.write_text(f"before\n{BEGIN}\n  LAB_GONE:\n{END}\nafter\n")
    assert main(["--write"]) == 0
    assert file.read_text() == f"before\n{compose_lines()}\nafter\n"
    file.write_text("services: {}\n")
    with pytest.raises(
        ValueError, match=r"has no line '# Written by `python -m distlab\.lab\.config\.variables --write`"
    ):
        main(["--write"])
    assert file.read_text() == "services: {}\n"


@pytest.mark.parametrize(
    ("variables", "code", "output"),
    [({"LAB_STEPS": "3"}, 0, ""), ({"LAB_STEP": "3", "WORLD_SIZE": "9"}, 2, "refused    LAB_STEP is not a variable of the lab")],
    ids=["fine", "refused"],
)  # fmt: skip
def test_a_check_starts_no_rank(
    variables: dict[str, str],
    code: int,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["--check"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(variables) if code else not lines
    assert not output or lines[0].startswith(output)


def test_the_modes_are_the_files_of_experiments() -> None:
    assert {"comm", "dp", "train"} <= set(modes())


def test_faults_and_options_are_found_without_torch() -> None:
    program = """import sys, distlab.lab.config as c, distlab.lab.config.variables as variables
variables.table()
try: c.Config.read({'WORLD_SIZE': '9'})
except c.ConfigError: print('torch' in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_two_runs_of_one_second_have_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.lab.config.settings.time.strftime", lambda _: "20261126-221257")
    names = []
    for _ in range(3):
        names.append(settings.claim_run_id(tmp_path / "runs", "dp"))
    assert names == ["dp-20261126-221257", "dp-20261126-221257-2", "dp-20261126-221257-3"]
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    assert settings.claim_run_id(tmp_path / "nowhere", "dp") == names[0]  # a folder that cannot be made


def test_runs_that_start_together_have_different_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.lab.config.settings.time.strftime", lambda _: "20261126-221257")
    for attempt in range(20):
        begin = threading.Barrier(8)

        def claimed(_: int, runs: Path = tmp_path / str(attempt), begin: threading.Barrier = begin) -> str:
            begin.wait(10)
            return settings.claim_run_id(runs, "dp")

        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(claimed, range(8)))) == 8


# Variables of real machines, with names similar to the lab's and others.
OF_OTHERS = """
    PATH HOME HOSTNAME SHELL LANG TERM USER PWD TZ EDITOR HOST PORT ADDR SIZE MODE MODEL TEXT STEPS SEED BATCH DEVICE RUN
    RANK_ID RANKS RANKING NRANKS NODE_RANK NODERANK GROUP_RANK ROLE_RANK LOCAL_RANKS GLOBAL_RANK PMI_RANK PMIX_RANK
    OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_SIZE MPI_LOCALRANKID MV2_COMM_WORLD_RANK JSM_NAMESPACE_RANK
    WORLD WORLD_SIZES LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE LOCAL_SIZE SLURM_PROCID SLURM_LOCALID SLURM_NTASKS
    MASTER MASTER_IP MASTER_HOST MASTER_ADDRESS MASTER_PORTS MASTER_SERVICE_HOST MASTER_SERVICE_PORT MASTER_PORT_29500_TCP
    MASTER_PORT_29500_TCP_ADDR WORKER0_PORT KUBERNETES_PORT KUBERNETES_SERVICE_HOST NODE_NAME POD_IP CI CI_JOB_ID RUNNER_OS
    RUNNER_NAME RUN_ID RUN_MODEL RUN_MODES RUN_CODE RUN_NAME RUN_NUMBER RUN_ATTEMPT GITHUB_RUN_ID GITHUB_RUN_NUMBER
    BUILD_ID TEST_MODE DEBUG_MODE DEV_MODE OMP_NUM_THREADS CUDA_VISIBLE_DEVICES NCCL_DEBUG GLOO_SOCKET_IFNAME
    TORCHELASTIC_RUN_ID PET_MASTER_PORT RAY_ADDRESS LABEL LABELS LABEL_SIZE LAB LABS COLLAB_TEXT COLAB_GPU JUPYTERLAB_DIR
    GITLAB_CI GITLAB_USER_ID GITLAB_LOG MATLAB_LOG SLAB_SIZE
""".split()  # noqa: SIM905  a line of 120 columns holds a dozen


@pytest.mark.parametrize(
    ("name", "typo"),
    [
        ("RUN_MODE", "RUN_MDOE"), ("RUN_MODE", "URN_MODE"), ("RUN_MODE", "RUNMODE"), ("RUN_MODE", "RUN_MOD"),
        ("RUN_MODE", "RUN_MMODE"), ("RUN_MODE", "RUN_MODDE"), ("RUN_MODE", "RUN_MODEE"), ("RUN_MODE", "RUN_NODE"),
        ("RUN_MODE", "TUN_MODE"), ("WORLD_SIZE", "WORLD_SZIE"), ("WORLD_SIZE", "WORDL_SIZE"), ("RANK", "RNAK"),
        ("MASTER_PORT", "MASTER_PROT"), ("MASTER_ADDR", "MASTER_ADR"), ("LOCAL_RANK", "LOCAL_RANKK"),
        ("LAB_WIDTH", "LBA_WIDTH"), ("LAB_WIDTH", "LAV_WIDTH"), ("LAB_WIDTH", "LABWIDTH"),
    ],
)  # fmt: skip
def test_a_typing_error_is_refused_with_all_other_faults(name: str, typo: str) -> None:
    found = faults(LAB_STEPS="x", **{typo: "2"})
    assert found == [
        f"{typo} is not a variable of the lab (did you mean {name!r}?)",
        "LAB_STEPS='x' is not a whole number",
    ]


def test_every_typing_error_is_refused_and_no_foreign_variable() -> None:
    known = {**aliases(Config), **aliases(declared("dp"))}
    for name in known:
        swapped = {name[:at] + name[at + 1] + name[at] + name[at + 2 :] for at in range(len(name) - 1)} - {name}
        left_out = {name[:at] + name[at + 1 :] for at in range(len(name))}
        doubled = {name[:at] + name[at] + name[at:] for at in range(len(name))}
        typos = (swapped | left_out | doubled) - known.keys()
        assert len(faults(**dict.fromkeys(typos, "2"))) == len(typos)
    Config.read(dict.fromkeys(OF_OTHERS, "2"))
