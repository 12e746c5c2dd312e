# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The trace: what is kept, what a file holds, the picture, and the command that judges a file."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.cli import main
from afd_dsv4.workspace.chrome import chrome
from afd_dsv4.workspace.trace import FIELDS, Header, Trace, TraceError, load, save
from tests.trace_events import valid

# One of every op, in microseconds: lease 1 on slot 0 from two streams, handed on to lease 2, which is quarantined.
STORY = [
    (0, "acquire", 1, 0, "generation 1", "live"),
    (1000, "map", 1, (4, 5)),
    (2000, "rewrite", 0),
    (3000, "copy", 0, 7),
    (4000, "touch", 1, 0, 7, (("lists", 4), "table"), (("pages", "c4"),), (3, "c4")),
    (5000, "record", 11, 7),
    (6000, "wait", 11, 8),
    (7000, "touch", 1, 0, 8, (), (("pages", "c4"),), None),
    (8000, "record", 12, 8),
    (9000, "seal", 1, True),
    (10000, "settle", 1, "not quiesced"),
    (11000, "acquire", 2, 0, "generation 2", "live"),
    (12000, "passed", 11),
    (13000, "wait", 12, 7),
    (14000, "touch", 2, 0, 7, (), ("*",), "*"),
    (15000, "replay", 2, "bucket 8", 7),
    (16000, "quarantine", 2, "its stream died"),
    (17000, "reset"),
    (18000, "close"),
]
UNORDERED = [record for record in STORY if record[1] != "wait"]


def saved(path: Path, records: list[Any], dropped: int = 0, about: dict[str, Any] | None = None) -> str:
    save(path, records, dropped, about)
    return str(path)


def test_the_story_has_every_op() -> None:
    assert {record[1] for record in STORY} == set(FIELDS)


# What is kept.


def test_records_come_back_in_order_with_rising_times() -> None:
    trace = Trace()
    trace.add("acquire", 1, 0, "generation 1", "live")
    trace.note(("record", 3, 7))
    trace.note(("wait", 3, 8))
    trace.add("seal", 1, True)
    records = trace.records()
    assert [record[1:] for record in records] == [
        ("acquire", 1, 0, "generation 1", "live"),
        ("record", 3, 7),
        ("wait", 3, 8),
        ("seal", 1, True),
    ]
    times = [record[0] for record in records]
    assert times == sorted(times)
    start, end = times[0], times[3]
    assert times[1:3] == [start + (end - start) // 3, start + 2 * (end - start) // 3]


def test_what_is_noted_at_either_end_has_the_nearest_time() -> None:
    trace = Trace()
    trace.note(("rewrite", 0))
    assert trace.records() == [(0, "rewrite", 0)]
    trace.add("reset")
    trace.note(("rewrite", 1))
    (first, _, _), (reset, _), (last, _, _) = trace.records()
    assert first == reset == last


class Who:
    def __str__(self) -> str:
        return "generation 9"


def test_an_execution_is_spelled_out_when_the_records_are_read() -> None:
    trace = Trace()
    trace.add("acquire", 1, 0, Who(), "live")
    assert trace.records()[0][1:] == ("acquire", 1, 0, "generation 9", "live")


@given(st.integers(2, 9), st.integers(0, 40))
def test_a_bounded_trace_keeps_the_newest_and_counts_the_rest(capacity: int, added: int) -> None:
    trace = Trace(capacity)
    for number in range(added):
        trace.add("passed", number)
    kept = [record[2] for record in trace.records()]
    assert kept == list(range(trace.dropped, added))
    assert min(added, capacity // 2) <= len(kept) <= capacity


def test_a_trace_without_a_bound_keeps_all() -> None:
    trace = Trace(None)
    for number in range(100_000):
        trace.add("passed", number)
    assert (len(trace.records()), trace.dropped) == (100_000, 0)


def test_what_is_cleared_counts_as_dropped() -> None:
    trace = Trace()
    trace.add("passed", 1)
    trace.note(("passed", 2))
    trace.clear()
    assert (trace.records(), trace.dropped) == ([], 2)
    trace.add("passed", 3)
    trace.note(("passed", 4))
    assert [record[2] for record in trace.records()] == [3, 4]


def test_a_trace_that_could_keep_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="keeps at least two records, got capacity 1; None keeps all"):
        Trace(1)


# Files.


def test_a_file_holds_every_op_and_gives_the_same_records_back(tmp_path: Path) -> None:
    path = saved(tmp_path / "trace.jsonl", STORY, 12, {"device": "model", "seed": 3})
    recorded = load(path)
    assert list(recorded.records) == STORY
    assert recorded.header == Header(len(STORY), 12, {"device": "model", "seed": 3})
    lines = Path(path).read_text().splitlines()
    assert json.loads(lines[0])["format"] == "afd-dsv4 trace"
    assert len(lines) == 1 + len(STORY)


def test_a_trace_saves_what_it_keeps(tmp_path: Path) -> None:
    trace = Trace(2)
    for number in range(4):
        trace.add("passed", number)
    trace.save(tmp_path / "trace.jsonl", {"seed": 1})
    recorded = load(tmp_path / "trace.jsonl")
    assert list(recorded.records) == trace.records()
    assert recorded.header == Header(len(trace.records()), trace.dropped, {"seed": 1})


class Colour(enum.Enum):
    RED = "red"


def test_enums_are_saved_as_their_values_and_numbers_of_arrays_as_numbers(tmp_path: Path) -> None:
    touch = (5, "touch", np.int64(1), 0, 7, (("pages", Colour.RED),), (), (np.int32(3), Colour.RED))
    path = saved(tmp_path / "trace.jsonl", [touch])
    assert load(path).records == ((5, "touch", 1, 0, 7, (("pages", "red"),), (), (3, "red")),)


values = st.recursive(st.text() | st.integers(), lambda each: st.lists(each, max_size=3).map(tuple), max_leaves=5)


@given(st.lists(st.tuples(st.lists(values, max_size=3).map(tuple), st.none() | values), max_size=20))
@settings(max_examples=30)
def test_parts_and_steps_come_back_equal(tmp_path_factory: pytest.TempPathFactory, touches: list[Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.jsonl"
    records = [(5, "touch", 1, 0, 7, parts, parts, step) for parts, step in touches]
    save(path, records)
    assert list(load(path).records) == records


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ((0, "tuch", 1), "record 0: has the unknown op 'tuch'; known are acquire, map, touch"),
        ((0, "passed", "one"), "record 0: event of passed is 'one'; it must be a whole number"),
        ((0, "touch", 1, 0, 7, ({1},), (), None), "record 0: reads of touch is ({1},); it must be a list of strings"),
        ((0, "passed"), "record 0: passed has 0 fields; it takes 1: event"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, record: Any, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    with pytest.raises(TraceError) as error:
        save(path, [record])
    assert says in str(error.value)
    assert not path.exists()


def test_about_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"about: is not JSON .*; use strings, finite numbers, lists and dicts only"):
        save(tmp_path / "trace.jsonl", [], about={"what": {1}})
    with pytest.raises(TraceError, match=r"about: is not JSON .*; use strings, finite numbers, lists and dicts only"):
        save(tmp_path / "trace.jsonl", [], about={"what": float("nan")})


@pytest.mark.parametrize("kept", range(len(STORY)))
def test_a_file_that_was_cut_off_at_any_line_is_no_trace(tmp_path: Path, kept: int) -> None:
    """Cut behind its first touches a trace with violations would be a clean one."""
    path = Path(saved(tmp_path / "trace.jsonl", STORY))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: 1 + kept]))
    with pytest.raises(TraceError) as error:
        load(path)
    assert str(error.value) == f"line 1: says 19 records, and {kept} follow; {CUT_OFF}"
    path.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(TraceError, match="says 19 records, and 20 follow"):
        load(path)


def test_a_time_at_either_end_of_what_is_read_can_be_drawn(tmp_path: Path) -> None:
    records = [(-(1 << 63), "acquire", 1, 0, "e", "live"), ((1 << 63) - 1, "seal", 1, True)]
    valid(chrome(load(saved(tmp_path / "trace.jsonl", records)).records))
    for beyond in (1 << 63, -(1 << 63) - 1):
        with pytest.raises(TraceError, match="does not begin with a time of 64 bits"):
            save(tmp_path / "trace.jsonl", [(beyond, "reset")])


HEADER = json.dumps({"format": "afd-dsv4 trace", "version": 2, "records": 1, "dropped": 0, "about": {}})
AT = "starting at: line 1 column 4 (char 3)"
CUT_OFF = "the file was cut off or edited; save the trace again"
MALFORMED: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "line 1: the file is empty; give a file that Trace.save wrote"),
    "no header": ('[0,"reset"]\n', "line 1: is [0, 'reset'], not the header of a trace; give a file that Trace.save"),
    "null": ("null\n", "line 1: is None, not the header of a trace"),
    "another format": ('{"format":"else"}\n', "line 1: is {'format': 'else'}, not the header of a trace"),
    "another version": (
        HEADER.replace("2", "1").replace(' "records": 1,', ""),
        "line 1: is a trace of version 1; this release reads version 2; save the trace again, or read it with the",
    ),
    "no version": (HEADER.replace("2", "true"), "line 1: is a trace of version True; this release reads version 2"),
    "too much": (HEADER[:-1] + ', "x": 1}', "'x'; it has format, version, records, dropped and about, and no more"),
    "too little": (
        HEADER.replace(', "about": {}', ""),
        "line 1: the header has 'format', 'version', 'records', 'dropped'; it has",
    ),
    "records": (HEADER.replace(": 1", ": 1.0"), "line 1: records is 1.0; it must be a whole number from 0"),
    "not a number": (HEADER.replace("{}", '{"x": NaN}'), "line 1: holds 'NaN', which is no finite number"),
    "infinity": (HEADER.replace("{}", '{"x": -Infinity}'), "line 1: holds '-Infinity', which is no finite number"),
    "too large": (HEADER.replace("{}", '{"x": 1e999}'), "line 1: holds '1e999', which is no finite number"),
    "far time": (HEADER + f'\n[1{"0" * 320},"reset"]', "line 2: does not begin with a time of 64 bits and an op"),
    "far slot": (HEADER + f'\n[0,"acquire",1,1{"0" * 30},"e","live"]', "it must be a whole number of 64 bits"),
    "dropped": (HEADER.replace(": 0", ": -1"), "line 1: dropped is -1; it must be a whole number from 0"),
    "about": (HEADER.replace("{}", "[]"), "line 1: about is []; it must be an object"),
    "cut off": (HEADER + '\n[0,"rese', f"line 2: is not JSON (Unterminated string {AT}); {CUT_OFF}"),
    "blank": (HEADER + "\n\n", "line 2: is not JSON"),
    "bytes": (HEADER.encode() + b"\n\xff\n", f"line 2: is not UTF-8 (invalid start byte at byte 0); {CUT_OFF}"),
    "deep": (HEADER + "\n" + "[" * 100_000, "line 2: is nested too deep"),
    "digits": (HEADER + "\n[" + "9" * 5000 + "]", "line 2: is nested too deep, or holds a number with thousands of"),
    "object": (HEADER + '\n{"op":"reset"}', "line 2: is {'op': 'reset'}, not a list; a record is [ns, op, fields...]"),
    "no time": (HEADER + '\n["reset"]', "line 2: does not begin with a time of 64 bits and an op (('reset',))"),
    "odd time": (HEADER + '\n[0.5,"reset"]', "line 2: does not begin with a time of 64 bits and an op"),
    "no op": (HEADER + "\n[0]", "line 2: does not begin with a time of 64 bits and an op"),
    "odd op": (HEADER + "\n[0,[1]]", "line 2: has the unknown op (1,); known are acquire, map"),
    "unknown op": (HEADER + '\n[0,"reset"]\n[0,"rest"]', "line 3: has the unknown op 'rest'; known are acquire, map"),
    "too few": (HEADER + '\n[0,"record",1]', "line 2: record has 1 fields; it takes 2: event, stream"),
    "too many": (HEADER + '\n[0,"reset",1]', "line 2: reset has 1 fields; it takes 0: none"),
    "kind": (HEADER + '\n[0,"acquire",1,0,"e","dead"]', "kind of acquire is 'dead'; it must be one of live, dummy"),
    "number": (HEADER + '\n[0,"passed",1.0]', "line 2: event of passed is 1.0; it must be a whole number"),
    "flag": (HEADER + '\n[0,"seal",true,true]', "line 2: lease of seal is True; it must be a whole number"),
    "no flag": (HEADER + '\n[0,"seal",1,1]', "line 2: whole of seal is 1; it must be true or false"),
    "text": (HEADER + '\n[0,"settle",1,null]', "line 2: outcome of settle is None; it must be a string"),
    "seats": (HEADER + '\n[0,"map",1,["a"]]', "line 2: seats of map is ('a',); it must be a list of whole numbers"),
    "parts": (HEADER + '\n[0,"touch",1,0,7,"x",[],null]', "line 2: reads of touch is 'x'; it must be a list of"),
    "part": (HEADER + '\n[0,"touch",1,0,7,[],[{}],null]', "line 2: writes of touch is ({},); it must be a list"),
    "deep part": (HEADER + '\n[0,"touch",1,0,7,[],[' + "[" * 99 + "]" * 99 + "],null]", "line 2: writes of touch is"),
    "step": (HEADER + '\n[0,"touch",1,0,7,[],[],[null]]', "line 2: step of touch is (None,); it must be null"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_line_is_an_error_with_its_number_and_a_remedy(tmp_path: Path, name: str) -> None:
    content, says = MALFORMED[name]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceError) as error:
        load(path)
    assert says in str(error.value)
    assert error.value.remedy


# The picture.


def test_the_picture_has_a_track_for_a_slot_a_slice_for_a_lease_and_an_arrow_for_an_edge() -> None:
    document = chrome(STORY)
    (track,) = valid(document).values()
    events = document["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"slot 0"}
    leases = [event for event in track if event["cat"] == "lease"]
    assert [(event["name"], event["ts"], event["dur"]) for event in leases] == [("lease 1", 0, 10), ("lease 2", 11, 5)]
    assert leases[0]["args"] == {
        "lease": 1,
        "execution": "generation 1",
        "kind": "live",
        "outcome": "not quiesced",
        "whole": True,
    }
    assert leases[1]["args"]["outcome"] == "quarantined"
    assert leases[1]["args"]["why"] == "its stream died"
    touches = [event for event in track if event["cat"] == "touch"]
    assert [(event["name"], event["ts"], event["dur"]) for event in touches] == [
        ("stream 7: 3/c4", 4, 1),
        ("stream 8", 7, 1),
        ("stream 7: *", 14, 1),
    ]
    assert touches[0]["args"] == {"lease": 1, "stream": 7, "reads": ["lists/4", "table"], "writes": ["pages/c4"]}
    arrows = [(event["name"], event["ph"], event["ts"]) for event in events if event["ph"] in "sf"]
    assert arrows == [("event 11", "s", 4), ("event 11", "f", 7), ("event 12", "s", 7), ("event 12", "f", 14)]
    instants = [(event["name"], event["ts"]) for event in events if event["ph"] == "i"]
    assert instants == [("quarantine of lease 2", 16), ("reset", 17), ("close", 18)]


def test_an_arrow_leads_from_one_slot_to_the_other() -> None:
    records = [
        (0, "acquire", 1, 0, "a", "live"),
        (1000, "acquire", 2, 3, "b", "live"),
        (2000, "touch", 1, 0, 7, (), ("x",), None),
        (3000, "record", 1, 7),
        (4000, "wait", 1, 8),
        (5000, "touch", 2, 3, 8, (), ("x",), None),
    ]
    document = chrome(records)
    assert set(valid(document)) == {1, 4}
    assert [event["tid"] for event in document["traceEvents"] if event["ph"] in "sf"] == [1, 4]
    leases = [event for event in document["traceEvents"] if event.get("cat") == "lease"]
    assert [(event["args"]["outcome"], event["ts"] + event["dur"]) for event in leases] == [("open", 6), ("open", 6)]


def _slices(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def _arrows(document: dict[str, Any], end: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == end]


PLANTED = {
    "a nanosecond too long": lambda d: _slices(d)[1].update(dur=6.001),
    "a slice without an end": lambda d: _slices(d)[0].pop("dur"),
    "a slice that ends before it begins": lambda d: _slices(d)[0].update(dur=-1),
    "before the first record": lambda d: _slices(d)[0].update(ts=-1),
    "a track without a name": lambda d: _slices(d)[0].update(tid=9),
    "an arrow without an end": lambda d: d["traceEvents"].remove(_arrows(d, "f")[0]),
    "an arrow back in time": lambda d: _arrows(d, "s")[0].update(ts=7.5),
    "an arrow to the next slice": lambda d: _arrows(d, "f")[0].pop("bp"),
    "an arrow from nowhere": lambda d: _arrows(d, "s")[1].update(ts=10.5),
    "two arrows of one id": lambda d: [a.update(id=1) for a in _arrows(d, "s") + _arrows(d, "f")],
    "an unknown phase": lambda d: _slices(d)[0].update(ph="Q"),
    "not JSON": lambda d: _slices(d)[0].update(dur=float("nan")),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_of_a_picture_is_found(fault: str) -> None:
    document = json.loads(json.dumps(chrome(STORY)))
    valid(document)
    PLANTED[fault](document)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        valid(document)


@pytest.mark.parametrize("cut", range(len(STORY) + 1))
def test_the_picture_of_any_part_of_a_trace_is_valid(cut: int) -> None:
    valid(chrome(STORY[cut:]))
    valid(chrome(STORY[:cut]))
    valid(chrome([record for record in STORY if record[1] != "seal"][cut:]))


# The command.


def test_a_clean_trace_is_0_and_one_line_that_says_what_was_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "check", saved(tmp_path / "trace.jsonl", STORY, 3)]) == 0
    assert capsys.readouterr().out == "trace: violations=0 records=19 leases=2 touches=3 edges=3 dropped=3\n"


def test_violations_are_1_and_each_is_a_line_with_both_sites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "check", saved(tmp_path / "trace.jsonl", UNORDERED)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["unordered reuse of a workspace slot"] * 2
    assert (
        "nothing orders record 6 (touch at 0.007 ms, lease 1 of generation 1, slot 0, stream 8) behind record 4"
        in lines[0]
    )
    assert "let stream 8 wait for an event recorded on stream 7" in lines[0]
    assert last == "trace: violations=2 records=17 leases=2 touches=3 edges=1 dropped=0"


def test_the_answer_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "check", "--json", saved(tmp_path / "trace.jsonl", UNORDERED, 2, {"seed": 5})]) == 1
    answer = json.loads(capsys.readouterr().out)
    violation = answer.pop("violations")[0]
    assert answer == {"records": 17, "leases": 2, "touches": 3, "edges": 1, "dropped": 2, "about": {"seed": 5}}
    assert (violation["kind"], violation["hazard"]) == ("slot", "write after write")
    assert violation["resources"] == [["pages", "c4"]]
    assert violation["text"].startswith("unordered reuse of a workspace slot: nothing orders record 8 ")
    assert (violation["first"]["number"], violation["first"]["stream"]) == (6, 7)
    assert violation["first"]["step"] == [3, "c4"]
    assert violation["second"] == {
        "number": 8,
        "us": 7.0,
        "op": "touch",
        "lease": 1,
        "execution": "generation 1",
        "slot": 0,
        "stream": 8,
        "step": None,
    }


def test_the_picture_is_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "picture.json"
    assert main(["trace", "chrome", saved(tmp_path / "trace.jsonl", STORY), "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == chrome(STORY)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "absent"], "trace: cannot read 'absent' (No such file or directory); give a trace, such as build/"),
        (["check", "a\0b"], "trace: cannot read"),
        (["check", "."], "trace: '.' is not a regular file; give a trace"),
        (["check", "fifo"], "trace: 'fifo' is not a regular file; give a trace"),
        (["check", "broken"], "trace 'broken', line 2: has the unknown op 'rest'; known are acquire"),
        (["chrome", "broken", "--out", "picture"], "trace 'broken', line 2: has the unknown op 'rest'"),
        (["chrome", "good", "--out", "absent/picture"], "out: cannot write 'absent/picture' (No such file"),
        (["chrome", "good", "--out", "a\0b"], "out: cannot write"),
        (["chrome", "good"], "the following arguments are required: --out; see afd-dsv4 trace chrome --help"),
        (["check"], "the following arguments are required: FILE; see afd-dsv4 trace check --help"),
        (["judge", "good"], "invalid choice: 'judge'"),
        ([], "see afd-dsv4 trace --help"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "good", STORY)
    (tmp_path / "broken").write_text(HEADER + '\n[0,"rest"]\n')
    os.mkfifo(tmp_path / "fifo")
    assert main(["trace", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("afd-dsv4: error: ")
    assert output.err.count("\n") == 1
    assert says in output.err


def test_the_command_runs_without_torch_and_vllm(tmp_path: Path) -> None:
    path = saved(tmp_path / "trace.jsonl", UNORDERED)
    script = (
        "import sys, afd_dsv4.cli as cli\n"
        f"status = cli.main(['trace', 'check', {path!r}])\n"
        "heavy = {'torch', 'torch_npu', 'vllm', 'vllm_ascend', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
