"""Sealing and opening: what has the key, is for this run, comes once and is as its kind is written is believed; nothing
else is. And where the key comes from."""

import itertools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlab.cluster.authenticated_messages import (
    KINDS,
    MAX_LINES,
    MAX_SOURCES,
    OTHERS,
    WINDOW,
    Dropped,
    Key,
    MessageVerifier,
    fault,
    key_of,
)
from distlab.cluster.heartbeat import Hearing, RunPosition
from distlab.cluster.message_signer import (
    ANYONE,
    HEAD,
    MAX_BODY_BYTES,
    MAX_BYTES,
    MAX_TEXT,
    MessageSigner,
    derive_name,
    mac_of,
)
from distlab.config import Config, ConfigError

KEY, OTHER_KEY, RUN = b"k" * 32, b"o" * 32, b"the run."
HERE = ("10.0.0.3", 4001)
BEAT: dict[str, Any] = {
    "kind": "beat", "rank": 1, "turn": 3, "calls": 2, "step": 4, "phase": "flat", "in_phase_s": 0.25, "memory": None,
    "accepted": 0, "bound": 0, "ended": 0, "left": 0, "counts": [7, 8], "hears": [[3, [0, 1]]],
}  # fmt: skip


class Heard:
    """An opener for RUN, and what it said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.dropped = Dropped(self.lines.append)
        self.opener = MessageVerifier(KEY, RUN, self.dropped)
        self.opener.knows_run = True

    def faults(self, *datagrams: bytes) -> list[str]:
        """What is wrong with each; empty where it was believed."""
        found = []
        for datagram in datagrams:
            before = self.dropped.by_fault.copy()
            believed = self.opener.open(datagram, HERE) is not None
            new = list((self.dropped.by_fault - before).elements())
            assert believed == (not new), "dropped is counted, and counted is dropped"
            found.append(new[0] if new else "")
        return found


def sealed_raw(body: bytes) -> bytes:
    """A datagram of somebody who has the key, with any body."""
    head = MessageSigner(KEY).seal({}, RUN)[: HEAD.size]
    return head + mac_of(KEY, head + bytes(32) + body) + body


def test_what_is_sealed_is_believed_once() -> None:
    seal, heard = MessageSigner(KEY), Heard()
    datagram = seal.seal(BEAT, RUN)
    opened = heard.opener.open(datagram, HERE)
    assert opened is not None
    assert (opened.message, opened.sender, opened.audience) == (BEAT, seal.sender, RUN)
    assert heard.faults(datagram, datagram) == ["come twice or late"] * 2
    assert heard.dropped.by_source == {"10.0.0.3": 2}


@pytest.mark.parametrize(
    ("datagram", "words"),
    [
        (b"", "not sealed"),
        (b'{"claim": {"rank": [1]}}', "not sealed"),
        (b"rkl1", "not sealed"),
        (os.urandom(500), "not sealed"),
        (MessageSigner(KEY).seal(BEAT, RUN) + b" ", "altered on the way"),
        (MessageSigner(KEY).seal(BEAT, RUN)[:-1], "altered on the way"),
        (MessageSigner(KEY).seal(BEAT, RUN)[:70], "altered on the way"),
        (MessageSigner(OTHER_KEY).seal(BEAT, RUN), "sealed with another key"),
        (MessageSigner(KEY).seal(BEAT, b"another."), "of another run"),
        (MessageSigner(KEY).seal(BEAT, ANYONE), "of another run"),
        (b"rkl1" + bytes(MAX_BYTES), "too long"),
        (sealed_raw(b"[" * 9000), "no JSON"),
        (sealed_raw(b'{"kind":"killed","rank":NaN}'), "no JSON"),
        (sealed_raw(b"\xff\xfe"), "no JSON"),
        (sealed_raw(b'{"kind":' + b"9" * 9000 + b"}"), "no JSON"),
        (sealed_raw(json.dumps(BEAT | {"in_phase_s": 10**400}).encode()), "not as its kind is written"),
        (sealed_raw(json.dumps(BEAT | {"memory": -(10**400)}).encode()), "not as its kind is written"),
        (sealed_raw(json.dumps(BEAT | {"turn": 10**4000}).encode()), "not as its kind is written"),
        (sealed_raw(json.dumps(BEAT | {"phase": "\ud800"}).encode()), "not as its kind is written"),
        (sealed_raw(b'{"kind":"beat","in_phase_s":1e999}'), "not as its kind is written"),
        (sealed_raw(b"[]"), "of an unknown kind"),
        (sealed_raw(b'{"kind":["beat"]}'), "of an unknown kind"),
        (sealed_raw(b'{"kind":"killed","rank":1024}'), "not as its kind is written"),
        (sealed_raw(b'{"kind":"killed","rank":true}'), "not as its kind is written"),
        (sealed_raw(b'{"kind":"killed","rank":1,"rank2":1}'), "not as its kind is written"),
    ],
    ids=itertools.count(),
)
def test_what_is_wrong_is_counted_by_its_fault(datagram: bytes, words: str) -> None:
    heard = Heard()
    assert heard.faults(datagram) == [words]
    assert heard.lines[0].startswith(f"dropped    a message {words}, from 10.0.0.3 port 4001")


def test_every_changed_bit_is_seen() -> None:
    datagram, heard = MessageSigner(KEY).seal({"kind": "killed", "rank": 1}, RUN), Heard()
    changed = [
        datagram[:place] + bytes([datagram[place] ^ 1 << bit]) + datagram[place + 1 :]
        for place in range(len(datagram)) for bit in (0, 7)
    ]  # fmt: skip
    assert "" not in heard.faults(*changed)
    assert heard.faults(datagram) == [""]


@given(st.binary(max_size=600))
@settings(max_examples=60, deadline=None)
def test_garbage_is_never_believed(body: bytes) -> None:
    assert "" not in Heard().faults(body, b"rkl1" + body, MessageSigner(KEY).seal(BEAT, RUN)[:12] + body)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from([10**400, -(10**400), 1e308, "\ud800", "é"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
names = sorted({name for fields in KINDS.values() for name in fields} | set(BEAT) | {"claim", "lost", "members"})


@given(st.sampled_from(sorted(KINDS)), st.dictionaries(st.sampled_from(names) | st.text(max_size=8), anything))
@settings(max_examples=60, deadline=None)
def test_json_of_any_shape_is_judged_without_an_error(kind: str, fields: dict[str, Any]) -> None:
    message = {**fields, "kind": kind}
    assert fault(message) in ("", "not as its kind is written")
    assert json.loads(json.dumps(message)) == message


@given(st.sampled_from(sorted(set(BEAT) - {"kind"})), anything)
@settings(max_examples=60, deadline=None)
def test_a_beat_with_one_wrong_field_is_none(name: str, value: Any) -> None:
    """What is let in has the type of the field."""
    if not fault({**BEAT, name: value}):
        kinds: dict[str, tuple[type, ...]] = {
            "phase": (str,),
            "counts": (list,),
            "hears": (list,),
            "in_phase_s": (int, float),
        }
        kinds["memory"] = (int, float, type(None))
        assert type(value) in kinds.get(name, (int,))


@given(st.binary(max_size=600) | anything.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=200, deadline=None)
def test_no_body_ends_who_reads_it(body: bytes) -> None:
    """Sealed with the key: a defective rank's, or that of one whose key was found out."""
    Heard().faults(sealed_raw(body), body)


@given(st.sampled_from(sorted(set(BEAT) - {"kind"})), anything)
@settings(max_examples=200, deadline=None)
def test_what_is_let_in_ends_nobody_who_takes_it(name: str, value: Any) -> None:
    if not fault(beat := {**BEAT, name: value}):
        hearing = Hearing(0, range(3), 3.0, 0.0)
        hearing.take(beat, 1.0)
        hearing.beat(RunPosition(), None, 2.0)
        hearing.hears(2.0)
        print(hearing.behind(RunPosition(turn=2**60), 2.0))


@given(st.lists(st.integers(1, 40), max_size=60))
@settings(max_examples=60, deadline=None)
def test_a_number_counts_once_and_not_late(order: list[int]) -> None:
    seal, heard = MessageSigner(KEY), Heard()
    datagrams = [seal.seal(BEAT, RUN) for _ in range(40)]
    believed: list[int] = []
    for number in order:
        fresh = number not in believed and number >= max(believed, default=0) - WINDOW
        assert (heard.faults(datagrams[number - 1]) == [""]) == fresh
        believed += [number] * fresh


def test_until_the_run_is_known_what_is_for_another_audience_is_not_counted() -> None:
    heard, beat = Heard(), MessageSigner(KEY).seal(BEAT, b"tokenabc")
    heard.opener.knows_run = False
    assert heard.opener.open(beat, HERE) is None
    assert heard.dropped.total == 0
    heard.opener.know_run(b"tokenabc")
    assert heard.faults(beat) == [""]


def test_lines_and_sources_are_bounded() -> None:
    lines: list[str] = []
    dropped = Dropped(lines.append)
    for number in range(1000):
        dropped.add(f"fault {number % 50}", (f"10.0.{number // 250}.{number % 250}", number))
    assert len(lines) == MAX_LINES
    assert len(dropped.by_source) == MAX_SOURCES + 1
    assert dropped.by_source[OTHERS] == 1000 - MAX_SOURCES
    assert dropped.total == 1000


def test_long_texts_are_cut_and_what_is_still_too_long_is_refused() -> None:
    lost = [{"rank": rank, "step": 1, "reason": "é" * 10_000} for rank in range(8)]
    verdict = {"exit_code": 3, "sentence": "x" * 10_000, "lost": lost}
    datagram = MessageSigner(KEY).seal({"kind": "verdict", "verdict": verdict, "stopped": False}, RUN)
    assert Heard().faults(datagram) == [""]
    sentence = {"kind": "refuse", "refuse": "y" * 10_000}
    opened = Heard().opener.open(MessageSigner(KEY).seal(sentence, RUN), HERE)
    assert opened is not None
    assert opened.message["refuse"] == "y" * MAX_TEXT
    with pytest.raises(ValueError, match=f"longer than the {MAX_BODY_BYTES} B"):
        MessageSigner(KEY).seal({"numbers": list(range(10_000))}, RUN)


def test_names_are_drawn_from_the_key() -> None:
    assert (
        derive_name(KEY, "store of a run")
        == derive_name(KEY, "store of a run")
        != derive_name(OTHER_KEY, "store of a run")
    )


def test_a_key_goes_to_a_child_process_by_itself() -> None:
    """What a process for heartbeats needs is bytes: its Seal is another sender than its rank's."""
    key = pickle.loads(pickle.dumps(KEY))
    assert MessageSigner(key).sender != MessageSigner(key).sender
    heard = Heard()
    assert heard.faults(MessageSigner(key).seal(BEAT, RUN), MessageSigner(key).seal(BEAT, RUN)) == ["", ""]


NOWHERE = Path("/nowhere/lab_key")


def key(run: str = "", secret: Path = NOWHERE, **environ: str) -> Key:
    return key_of(Config.read({"RANK": "1", "MASTER_ADDR": "a"} | environ), run, secret)


def test_what_is_given_makes_the_key() -> None:
    given = key(LAB_KEY="0123456789abcdef")
    assert given == key(LAB_KEY="0123456789abcdef", MASTER_PORT="7", RUN_MODE="comm")
    assert given != key(LAB_KEY="0123456789abcdeF")
    assert (len(given.secret), given.derived) == (32, False)


def test_without_one_it_is_derived_from_what_all_ranks_share_whatever_else_differs() -> None:
    derived = key()
    assert derived.derived
    assert derived == key(RUN_MODE="comm", WORLD_SIZE="3", LAB_STEPS="7", RANK="0")  # those are refused by name
    assert derived != key(MASTER_PORT="7")
    assert derived != key("another run of the agent")


def test_a_mounted_secret_is_taken_where_no_variable_is_set(tmp_path: Path) -> None:
    secret = tmp_path / "lab_key"
    secret.write_text("0123456789abcdef\n")
    assert key(secret=secret) == key(LAB_KEY="0123456789abcdef")
    assert key(secret=secret, LAB_KEY="fedcba9876543210") == key(LAB_KEY="fedcba9876543210")
    secret.write_text("")
    assert key(secret=secret) == key()


def test_a_file_of_ones_own_comes_before_a_mounted_one(tmp_path: Path) -> None:
    own, mounted = tmp_path / "own", tmp_path / "lab_key"
    own.write_text("0123456789abcdef\n")
    mounted.write_text("fedcba9876543210\n")
    assert key(secret=mounted, LAB_KEY_FILE=str(own)) == key(LAB_KEY="0123456789abcdef")
    assert key(LAB_KEY="fedcba9876543210", LAB_KEY_FILE=str(own)) == key(LAB_KEY="fedcba9876543210")


def test_a_mounted_secret_that_is_too_short_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "lab_key"
    secret.write_text("guess")
    with pytest.raises(ConfigError, match="lab_key, the key of this run, holds 5 characters: expected 16 and more"):
        key(secret=secret)


def test_a_secret_that_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "lab_key"
    secret.write_text("0123456789abcdef")

    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("distlab.cluster.authenticated_messages.read_key", denied)
    with pytest.raises(ConfigError, match="lab_key, the key of this run, cannot be read: Permission denied"):
        key(secret=secret)
