# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Plans over lists of settings: what they say, counted the long way, and the page that draws them."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.cli import main
from afd_dsv4.geometry import DEFAULT_STACK, InputError, page_layout, preset
from afd_dsv4.page import _CSS, Bar, bars, data, document, tag
from afd_dsv4.plan import Question, as_table, sweep
from afd_dsv4.plan import document as document_of
from afd_dsv4.plan_page import page
from afd_dsv4.workspace.sizing import size_workspace
from tests import pages
from tests.unit.test_cli import FLASH_CONFIG

FLASH = ["plan", "--model", "flash", "--block-size", "128"]
ONE = [*FLASH, "--prompt-tokens", "63778", "--max-num-batched-tokens", "65536", "--free-blocks", "6958"]
MANY = [
    *("plan", "--model", "flash,pro", "--block-size", "128,32", "--prompt-tokens", "4096,63778"),
    *("--max-num-batched-tokens", "4096,65536", "--hbm-gib", "21.0618,0.25,0.005", "--max-num-seqs", "16"),
]


def ask(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


WINDOWS = {"swa": (2, 128, 128), "c4_state": (1, 8, 8), "c128_state": (1, 128, 32)}  # groups, window, rows of a block


def needed_by_group(tokens, chunk, *, state, longest=1 << 20):
    """Blocks of a Flash prompt at block size 128: what `KVCacheManager` asks for, group by group, spelled out.

    `chunk` is the tokens in flight: two chunks with asynchronous scheduling.
    """
    found = {"c4_mla": -(-(tokens // 4) // 128), "c128_mla": -(-(tokens // 128) // 128)}  # one group each
    for name, (groups, window, rows) in WINDOWS.items():
        alive = min(window - 1 + chunk, longest)
        counted = state or name == "swa"
        found[name] = counted * groups * min(-(-tokens // rows), -(-alive // rows) + 1)
    return found


def needed(tokens, chunk, *, state):
    return sum(needed_by_group(tokens, chunk, state=state).values())


def kept(tokens, *, state):
    """Blocks that a prefilled Flash prompt keeps: of each window those that its last `window - 1` tokens touch."""
    found = {"c4_mla": -(-(tokens // 4) // 128), "c128_mla": -(-(tokens // 128) // 128)}
    for name, (groups, window, rows) in WINDOWS.items():
        touched = {position // rows for position in range(max(0, tokens - window + 1), tokens)}
        found[name] = (state or name == "swa") * groups * len(touched)
    return found


def test_the_long_way_is_the_published_case():
    assert (needed(63778, 65536, state=True), needed(63778, 65536, state=False)) == (11094, 1127)


@pytest.mark.parametrize(("prompt", "chunk", "free"), [(63778, 65536, 6958), (32768, 8192, 1500), (20000, 20000, 300)])
def test_the_largest_chunk_is_the_last_that_starts(capsys, prompt, chunk, free):
    lists = ["--prompt-tokens", f"{prompt},1", "--max-num-batched-tokens", str(chunk), "--free-blocks", str(free)]
    answer = json.loads(ask(capsys, *FLASH, *lists, "--json"))["answers"][0]
    for side, state in (("native", True), ("plugin", False)):
        largest = answer[side]["largest_chunk"]
        assert answer[side]["blocks_needed"] == needed(prompt, 2 * chunk, state=state)
        assert 0 < largest <= prompt
        assert needed(prompt, 2 * largest, state=state) <= free
        assert largest == prompt or needed(prompt, 2 * (largest + 1), state=state) > free
    assert json.loads(ask(capsys, *ONE, "--json"))["native"]["blocks_needed"] == 11094


def test_requests_are_counted_one_by_one(capsys):
    lists = ["--prompt-tokens", "10000,63778", "--max-num-batched-tokens", "65536", "--free-blocks", "1500"]
    answers = json.loads(ask(capsys, *FLASH, *lists, "--max-num-seqs", "40", "--json"))["answers"]
    for answer in answers:
        prompt = answer["prompt_tokens"]
        keeps = sum(kept(prompt, state=False).values())
        free, there = 1500, 0
        while there < 40 and needed(prompt, 65536, state=False) <= free:
            there, free = there + 1, free - keeps
        assert answer["plugin"]["resident_blocks"] == keeps
        assert answer["plugin"]["requests_at_once"] == there > 1
        assert answer["plugin"]["requests_limited_by"] == ("max_num_seqs" if there == 40 else "swa")
        assert answer["plugin"]["start_limited_by"] == "swa"
        assert answer["native"]["start_limited_by"] == "c4_state"
    assert {answer["plugin"]["requests_limited_by"] for answer in answers} == {"max_num_seqs", "swa"}


@pytest.mark.parametrize("prompt", [126, 127, 128, 129, 8 * 128 + 126, 8 * 128 + 127, 8 * 128 + 128, 32 * 128 + 7])
def test_a_prefilled_prompt_keeps_the_blocks_that_the_window_of_the_next_token_touches(capsys, prompt):
    """Before and at the edge of a block of every group: a window less one token ends there."""
    sizes = ["--prompt-tokens", f"{prompt},1", "--max-num-batched-tokens", "512", "--free-blocks", "6958"]
    answer = json.loads(ask(capsys, *FLASH, *sizes, "--json"))["answers"][0]
    for side, state in (("native", True), ("plugin", False)):
        assert answer[side]["resident_by_group"] == kept(prompt, state=state)


@pytest.mark.parametrize(
    ("prompt", "chunk", "gib", "limits"),
    [
        (32768, 8192, 12, ("c4_state", "c4_mla")),  # one more natively would want 2,050 for its C4 state alone
        (32768, 1024, 6, ("c4_mla", "c4_mla")),
        (131072, 65536, 40, ("c4_state", "c4_mla")),
        (63778, 65536, 8, ("c4_state", "c4_mla")),  # natively not even one
    ],
)
def test_what_limits_requests_is_what_most_blocks_are_of_when_there_is_one_more(capsys, prompt, chunk, gib, limits):
    lists = ["--prompt-tokens", f"{prompt},1", "--max-num-batched-tokens", str(chunk), "--hbm-gib", str(gib)]
    answer = json.loads(ask(capsys, *FLASH, *lists, "--max-num-seqs", "64", "--json"))["answers"][0]
    for side, state, limit in (("native", True, limits[0]), ("plugin", False, limits[1])):
        found = answer[side]
        need, keeps = needed_by_group(prompt, 2 * chunk, state=state), kept(prompt, state=state)
        blocks, there = dict(need), 0  # of the one that is tried, and of those that are there
        while there < 64 and sum(blocks.values()) <= found["free_blocks"]:
            blocks, there = {name: blocks[name] + keeps[name] for name in blocks}, there + 1
        assert there == found["requests_at_once"] < 64
        assert found["requests_limited_by"] == max(blocks, key=blocks.get) == limit


def test_a_sweep_has_a_row_for_every_combination_and_says_why_one_has_no_answer(capsys):
    text = ask(capsys, *MANY)
    rows = [line for line in text.splitlines() if re.match(r" *(flash|pro) ", line)]
    assert len(rows) == 2 * 2 * 2 * 2 * 3
    assert "longest sequence 1,048,576, max-num-seqs 16 on vllm-ascend-0.23.0" in text.splitlines()[0]
    refused = re.findall(r"\n(?:flash|pro), 128, 0.005 GiB, [\d, ]+: HBM budget: 0.005 GiB hold no two KV blocks", text)
    assert sum(" -  " in row for row in rows) == len(refused) == 2 * 2 * 2
    small = re.findall(
        r"\n(?:flash|pro), \d+, 0.(?:25|005) GiB, [\d, ]+, plugin: no server starts: 0.(?:25|005) GiB do", text
    )
    answers = json.loads(ask(capsys, *MANY, "--json"))["answers"]
    crowded = [answer for answer in answers if "plugin" in answer and not answer["plugin"]["reserve_fits"]]
    assert len(small) == len(crowded) > 0
    for answer in crowded:
        room = int(answer["hbm_gib"] * 2**30) - answer["plugin"]["reserved_bytes"]
        assert room < 2 * answer["plugin"]["block_bytes"]
        assert answer["plugin"]["free_blocks"] == answer["plugin"]["requests_at_once"] == 0
        assert answer["native"]["free_blocks"] == int(answer["hbm_gib"] * 2**30) // answer["native"]["block_bytes"] - 1
    assert "native next limit: compressor state (c4_state and c128_state) with 39,862 of 44,365 blocks" in text
    assert "plugin next limit: the sliding-window groups (swa) with 3,988 of 4,503 blocks" in text


def test_where_max_num_seqs_is_what_limits_the_table_marks_the_requests(capsys):
    lists = ["--prompt-tokens", "10000,63778", "--max-num-batched-tokens", "65536", "--free-blocks", "1500"]
    answers = json.loads(ask(capsys, *FLASH, *lists, "--max-num-seqs", "40", "--json"))["answers"]
    text = ask(capsys, *FLASH, *lists, "--max-num-seqs", "40")
    rows = [line.split() for line in text.splitlines() if re.match(r" *(10,000|63,778) ", line)]
    limits = [answer["plugin"]["requests_limited_by"] for answer in answers]
    assert limits == ["max_num_seqs", "swa"]
    assert [row[-1] for row in rows] == ["40*", str(answers[1]["plugin"]["requests_at_once"])]
    assert [row[-6] for row in rows] == ["0", "0"]
    assert "\n* as many as --max-num-seqs allows\n" in text
    for unmarked in (["--max-num-seqs", "200"], []):
        memory = ["--free-blocks", "1500"] if unmarked else []
        assert "*" not in ask(capsys, *FLASH, *lists[:4], *memory, *unmarked)


@pytest.mark.parametrize("lists", [["--hbm-gib", "24"], ["--hbm-gib", "24,40"]])
def test_the_list_and_the_page_say_the_longest_sequence(capsys, tmp_path, lists):
    html = ["--max-model-len", "70000", "--html", str(tmp_path / "plan.html")]
    text = ask(capsys, *ONE[:-2], *lists, *html)
    assert "longest sequence 70,000" in text.splitlines()[0]
    drawn = pages.read((tmp_path / "plan.html").read_text())[0]
    headings = [heading.text for heading in drawn.all("h2") if heading.text.startswith("flash")]
    assert len(headings) == lists[1].count(",") + 1
    for shown in (drawn.all("p")[1].text, *headings):
        assert "longest sequence 70,000, " in shown


def test_models_of_different_length_have_it_as_a_column(capsys, tmp_path):
    path = tmp_path / "short.json"
    path.write_text(json.dumps({**FLASH_CONFIG, "max_position_embeddings": 65536}))
    lists = ["--model", f"flash,{path}", "--prompt-tokens", "4096", "--max-num-batched-tokens", "4096"]
    rows = [line.split() for line in ask(capsys, "plan", "--block-size", "128", *lists).splitlines()]
    assert [row[:2] for row in rows if row[:1] in (["flash"], ["short.json"])] == [
        ["flash", "1,048,576"],
        ["short.json", "65,536"],
    ]


def parts_of(text):
    """Heading and curves of each part of a page."""
    found = []
    for part in pages.read(text)[0].all("section"):
        if part.attributes["aria-labelledby"].startswith("part"):
            titles = [title.text for title in part.all("figcaption")]
            found.append((part.all("h2")[0].text, sum(", by chunk" in title for title in titles)))
    return found


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["A", "B"], ["A/config.json", "B/config.json"]),
        (["A/x", "B/x", "C"], ["A/x/config.json", "B/x/config.json", "C/config.json"]),
        ([".", "B"], ["./config.json", "B/config.json"]),
        (["", "B"], ["config.json", "B/config.json"]),
    ],
)
def test_models_whose_files_have_one_name_are_told_apart_by_the_end_of_their_paths(
    capsys, tmp_path, monkeypatch, folders, names
):
    monkeypatch.chdir(tmp_path)
    lengths = [32768 << number for number in range(len(folders))]
    for folder, length in zip(folders, lengths, strict=True):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "config.json").write_text(json.dumps({**FLASH_CONFIG, "max_position_embeddings": length}))
    paths = [f"{folder}/config.json" if folder else "config.json" for folder in folders]
    lists = ["--model", ",".join(paths), "--prompt-tokens", "4096", "--max-num-batched-tokens", "4096"]
    plan = ["plan", "--block-size", "128", "--hbm-gib", "20", *lists]
    text = ask(capsys, *plan, "--html", "plan.html")
    assert [line.split()[0] for line in text.splitlines() if "config.json" in line] == names
    assert [answer["model"] for answer in json.loads(ask(capsys, *plan, "--json"))["answers"]] == names
    parts = parts_of((tmp_path / "plan.html").read_text())
    assert [(heading.split(",")[0], curves) for heading, curves in parts] == [(name, 1) for name in names]


def test_models_of_one_content_in_two_places_are_two_and_a_preset_is_one_whatever_it_was_called(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for folder in ("A", "B"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(FLASH_CONFIG))
    (tmp_path / "flash").write_text(json.dumps(FLASH_CONFIG))
    for asked, names in (
        ("A/config.json,B/config.json", ["A/config.json", "B/config.json"]),
        ("flash,deepseek-ai/DeepSeek-V4-Flash,pro", ["flash", "pro"]),
        ("flash,./flash", ["flash", "./flash"]),
        ("A/config.json,pro", ["config.json", "pro"]),
    ):
        lists = ["--model", asked, "--prompt-tokens", "4096", "--max-num-batched-tokens", "4096", "--json"]
        answers = json.loads(ask(capsys, "plan", "--block-size", "128", *lists))["answers"]
        assert [answer["model"] for answer in answers] == names


def test_models_of_one_name_that_differ_are_drawn_apart():
    models = [preset("flash"), replace(preset("flash"), max_position_embeddings=1 << 16)]
    questions = [
        Question(
            geometry=model,
            layout=page_layout(DEFAULT_STACK, 128),
            stack=DEFAULT_STACK,
            prompt_tokens=4096,
            max_num_batched_tokens=4096,
            max_num_seqs=16,
            max_model_len=model.max_position_embeddings,
            async_scheduling=True,
            slots=2,
            executor="stock",
            tile_tokens=None,
        )
        for model in models
    ]
    parts = parts_of(page(document_of(sweep(questions), ["afd-dsv4", "plan"])))
    assert [(heading.split(", ")[2], curves) for heading, curves in parts] == [
        ("longest sequence 1,048,576", 1),
        ("longest sequence 65,536", 1),
    ]


def test_memories_that_differ_little_are_two_parts_and_two_names(capsys, tmp_path):
    memory = ["--hbm-gib", "21.06181,21.06184,24", "--html", str(tmp_path / "plan.html")]
    text = ask(capsys, *ONE[:-2], *memory)
    rows = [line.split()[:2] for line in text.splitlines() if re.match(r" *\d\S* GiB ", line)]
    assert rows == [["21.06181", "GiB"], ["21.06184", "GiB"], ["24", "GiB"]]
    parts = parts_of((tmp_path / "plan.html").read_text())
    assert [(heading.rpartition("memory ")[2], curves) for heading, curves in parts] == [
        ("21.06181 GiB", 1),
        ("21.06184 GiB", 1),
        ("24 GiB", 1),
    ]


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        (["--max-num-seqs", "128"], {"--max-num-seqs"}),
        (["--max-num-seqs", "1", "--slots", "900"], {"--slots"}),
        (["--max-num-seqs", "16", "--slots", "1", "--max-num-batched-tokens", "30000000"], {"--max-num-seqs"}),
        (
            ["--max-num-seqs", "2", "--slots", "2", "--max-num-batched-tokens", "50000000"],
            {"--max-num-seqs", "--slots", "--max-num-batched-tokens"},
        ),
        (["--max-num-seqs", "128", "--slots", "900"], set()),
    ],
)
def test_of_a_plugin_that_reserves_all_there_is_the_ways_that_start_the_prompt_are_said(capsys, options, ways):
    plan = [*FLASH, "--prompt-tokens", "512", "--max-num-batched-tokens", "512", "--hbm-gib", "0.2", *options, "--json"]
    answer = json.loads(ask(capsys, *plan))
    bytes_of = int(0.2 * 2**30)
    assert answer["native"]["free_blocks"] == bytes_of // answer["native"]["block_bytes"] - 1
    plugin = answer["plugin"]
    reserved = plugin["reserved_bytes"]
    assert bytes_of - reserved < 2 * plugin["block_bytes"]
    assert (plugin["free_blocks"], plugin["admitted"], plugin["reserve_fits"]) == (0, False, False)
    assert f"0.2 GiB do not hold the {reserved:,} bytes that the plugin reserves" in plugin["reason"]
    said = {
        option: int(most.replace(",", "")) for option, most in re.findall(r"or (--[a-z-]+) ([\d,]+)", plugin["reason"])
    }
    assert set(said) == ways
    for option, most in said.items():
        for value in (most, most + 1):
            other = json.loads(ask(capsys, *plan, option, str(value)))["plugin"]
            assert other["admitted"] is (value == most)
    (gib,) = re.findall(r"To start the prompt: ([\d.]+) GiB", plugin["reason"])
    assert json.loads(ask(capsys, *plan, "--hbm-gib", gib))["plugin"]["admitted"] is True


@pytest.mark.parametrize("model", ["flash", "pro"])
@pytest.mark.parametrize("block_size", ["32", "64", "128"])
def test_memory_that_holds_no_block_is_refused_with_the_figure_that_is_enough_and_no_other_way(
    capsys, model, block_size
):
    plan = [
        "plan",
        "--model",
        model,
        "--block-size",
        block_size,
        "--prompt-tokens",
        "7",
        "--max-num-batched-tokens",
        "7",
    ]
    assert main([*plan, "--hbm-gib", "0.0005"]) == 2
    (gib,) = re.findall(r"; offer at least ([\d.]+) GiB\n", capsys.readouterr().err)
    assert json.loads(ask(capsys, *plan, "--hbm-gib", gib, "--json"))["native"]["free_blocks"] >= 1


def test_the_page_says_of_the_plugin_alone_that_its_reservation_does_not_fit(capsys, tmp_path):
    sizes = [
        "--prompt-tokens",
        "512",
        "--max-num-batched-tokens",
        "512",
        "--hbm-gib",
        "0.2",
        "--max-num-seqs",
        "16,128",
    ]
    ask(capsys, *FLASH, *sizes, "--html", str(tmp_path / "plan.html"))
    text = (tmp_path / "plan.html").read_text()
    assert pages.faults(text) == []
    words = [folded.text for folded in pages.read(text)[0].all("details")]
    (said,) = [text for text in words if "without room" in text]
    assert said.startswith("2 without room for what the plugin reserves")
    for seqs in ("16", "128"):
        assert (
            f"flash, block size 128, longest sequence 1,048,576, {seqs} requests, memory 0.2 GiB, chunk 512, plugin: no"
            in said
        )


def test_drafts_make_the_tails_of_a_server_that_drafts(capsys, tmp_path):
    plan = [*FLASH, "--prompt-tokens", "4096", "--max-num-batched-tokens", "4096", "--executor", "afd"]
    for drafts in (0, 1, 3):
        sizes = size_workspace(
            preset("flash"),
            page_layout(DEFAULT_STACK, 128),
            max_num_seqs=16,
            max_num_batched_tokens=4096,
            drafts=drafts,
            slots=2,
            tile_tokens=2048,
        )
        option = ["--drafts", str(drafts)] if drafts else []
        plugin = json.loads(ask(capsys, *plan, *option, "--json"))["plugin"]
        assert plugin["drafts"] == drafts
        assert plugin["tail_bytes_per_request"] == sizes.tail_bytes_per_request
        assert (plugin["reserved_bytes"], plugin["host_bytes"]) == (sizes.device_bytes, sizes.host_bytes)
        words = f", tails for {drafts} draft token{'s' * (drafts > 1)}"
        assert (f"{words}), 2 workspace slots" in ask(capsys, *plan, *option)) is bool(drafts)
        lists = [*option, "--hbm-gib", "24,40", "--html", str(tmp_path / "plan.html")]
        assert (f"{words}\n" in ask(capsys, *plan, *lists)) is bool(drafts)
        drawn = pages.read((tmp_path / "plan.html").read_text())[0].all("main")[0].text
        assert (f"{words}." in drawn) is bool(drafts)


def test_the_list_and_the_page_say_which_scheduling_was_counted_with(capsys, tmp_path):
    for option, words in (
        ([], "asynchronous scheduling (2"),
        (["--no-async-scheduling"], "no asynchronous scheduling (1"),
    ):
        text = ask(capsys, *MANY, *option, "--html", str(tmp_path / "plan.html"))
        assert f"on vllm-ascend-0.23.0, {words}" in text.splitlines()[0]
        assert f", {words}" in pages.read((tmp_path / "plan.html").read_text())[0].all("main")[0].text
        answers = json.loads(ask(capsys, *MANY, *option, "--json"))["answers"]
        assert {answer["async_scheduling"] for answer in answers} == {not option}


@pytest.mark.parametrize("model", ["flash", "pro"])
@pytest.mark.parametrize("tokens", ["32768", "65536", "131072"])
def test_the_page_and_the_reason_say_one_figure_of_the_memory_that_starts_a_prompt(capsys, tmp_path, model, tokens):
    batch = ["--prompt-tokens", tokens, "--max-num-batched-tokens", tokens, "--block-size", "128", "--json"]
    plan = ["plan", "--model", model, *batch]
    native = json.loads(ask(capsys, *plan, "--free-blocks", "10", "--html", str(tmp_path / "plan.html")))["native"]
    found = pages.carried((tmp_path / "plan.html").read_text())["answers"][0]
    least = (native["blocks_needed"] + 1) * native["block_bytes"]  # block 0 is never handed out
    (reason,) = re.findall(r"To start it: ([\d.]+ GiB)", native["reason"])
    assert (found["native"]["kv_bytes"], found["native"]["needed_bytes"]) == (least, least)
    drawn = (tmp_path / "plan.html").read_text()
    assert f'value="{least}" data-path="/answers/0/native/needed_bytes">{reason}</data>' in drawn
    for side in ("native", "plugin"):
        enough = found[side]["needed_bytes"]
        for size, starts in ((enough, True), (enough - 1, False)):
            answer = json.loads(ask(capsys, *plan, "--hbm-gib", repr(size / 2**30)))
            assert answer[side]["admitted"] is starts


def test_one_value_each_is_answered_as_without_lists(capsys):
    one = json.loads(ask(capsys, *ONE, "--json"))
    (wide, other) = json.loads(ask(capsys, *ONE[:-1], "6958,6959", "--json"))["answers"]
    assert other["native"]["free_blocks"] == 6959
    for side in ("native", "plugin"):
        assert {key: wide[side][key] for key in one[side]} == one[side]
        assert not {"largest_chunk", "requests_at_once"} & set(one[side])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "8,,9"], "argument --prompt-tokens: '' is not a whole number"),
        (["--block-size", "128,100"], "block size: 100 is not offered"),
        (["--model", "flash,gpt"], "model: cannot read 'gpt'"),
        (["--prompt-tokens", ",".join(map(str, range(1001, 2002)))], "plan: the lists give 1,001 combinations"),
        (["--html", "absent/page.html"], "html: cannot write 'absent/page.html'"),
        (["--free-blocks", "5", "--hbm-gib", "5,6"], "not allowed with argument"),
        (["--prompt-tokens", "2000000,3000000"], "prompt: 2000000 tokens, the longest sequence is 1048576"),
    ],
)
def test_a_wrong_list_is_one_line(capsys, arguments, message):
    given = [*FLASH, "--prompt-tokens", "1000", "--max-num-batched-tokens", "1000", *arguments]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@settings(max_examples=25)
@given(drawn=st.data())
def test_any_plan_has_a_page_without_fault_and_chunks_that_are_the_last_to_start(drawn):
    lists = drawn.draw(
        st.lists(
            st.tuples(st.integers(1, 200_000), st.integers(1, 1 << 40), st.integers(1, 300)), min_size=1, max_size=3
        )
    )
    memory = drawn.draw(
        st.sampled_from([{}, {"free_blocks": 0}, {"free_blocks": 3000}, {"hbm_gib": 0.3}, {"hbm_gib": 1e6}])
    )
    layout = page_layout(DEFAULT_STACK, 128)
    questions = [
        Question(
            geometry=preset("flash"),
            layout=layout,
            stack=DEFAULT_STACK,
            prompt_tokens=prompt,
            max_num_batched_tokens=chunk,
            max_num_seqs=seqs,
            max_model_len=1 << 20,
            async_scheduling=drawn.draw(st.booleans()),
            slots=2,
            executor="afd",
            tile_tokens=2048,
            **memory,
        )
        for prompt, chunk, seqs in lists
    ]
    answers = []
    with contextlib.suppress(InputError):  # none has an answer
        answers = sweep(questions)
    if not answers:
        assert "hbm_gib" in memory
        return
    assert pages.faults(page(document_of(answers, ["afd-dsv4", "plan"]))) == []
    assert as_table(answers)
    for entry in answers:
        for side in entry.sides.values():
            if memory in ({"free_blocks": 0}, {"free_blocks": 3000}):
                free, flights = memory["free_blocks"], 1 + entry.question.async_scheduling
                state = side is entry.sides["native"]
                prompt, largest = entry.question.prompt_tokens, side.largest_chunk
                assert not largest or needed(prompt, flights * largest, state=state) <= free
                assert largest == prompt or needed(prompt, flights * (largest + 1), state=state) > free


@pytest.fixture(params=[ONE, MANY, [*FLASH, "--prompt-tokens", "7", "--max-num-batched-tokens", "1,2,3"]], ids=len)
def asked(request, capsys, tmp_path):
    arguments = [*request.param, "--html", str(tmp_path / "plan.html")]
    ask(capsys, *arguments)
    return arguments, (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_every_figure_of_the_page_is_the_documents_and_nothing_is_fetched(asked, capsys):
    arguments, page = asked
    assert pages.faults(page) == []
    document = pages.carried(page)
    printed = json.loads(ask(capsys, *arguments, "--json"))
    if len(document["answers"]) > 1:
        assert {**printed, "command": []} == {**document, "command": []}
    else:
        assert all(document["answers"][0][side].items() >= printed[side].items() for side in ("native", "plugin"))
    shown = pages.pointers(page)
    for number, answer in enumerate(document["answers"]):
        if "refused" not in answer:
            keys = ("blocks_needed", "free_blocks", "admitted", "largest_chunk", "requests_at_once")
            assert {f"/answers/{number}/{side}/{key}" for side in ("native", "plugin") for key in keys} <= shown


def test_the_page_names_the_next_limit_and_the_command(asked):
    arguments, page = asked
    words = pages.read(page)[0].all("main")[0].text
    assert words.count("Next limit:") == 2
    if "63778" in "".join(arguments):
        assert "the sliding-window groups (swa)" in words
    assert arguments[2] in words


PLANTS = {
    "fetches src": ("<main>", '<main><img src="https://example.com/a.png">'),
    "fetches href": ("<main>", '<main><a href="//example.com">x</a>'),
    "a script that runs": ("<main>", "<main><script>1</script>"),
    "runs onclick": ("<main>", '<main><p onclick="1"></p>'),
    "the style fetches": ("<style>", "<style>@import 'a';"),
    "id short 2 times": ("<main>", '<main><p id="short"></p>'),
    "no id other": ('aria-labelledby="short"', 'aria-labelledby="other"'),
    "without words": (' role="img"', ""),
    "ends <main>": ("</main>", "</div></main>"),
    "the page says": (">11,094</data>", ">11,095</data>"),
    "the page has": ('value="11094"', 'value="11095"'),
    "nothing at": ('data-path="/answers/0/native/blocks_needed"', 'data-path="/answers/0/native/blocks"'),
    "no language": (' lang="en"', ""),
}


@pytest.mark.parametrize("fault", PLANTS)
def test_a_planted_fault_of_a_page_is_found(fault, capsys, tmp_path):
    ask(capsys, *ONE, "--html", str(tmp_path / "plan.html"))
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    old, new = PLANTS[fault]
    assert old in page
    broken = page.replace(old, new, 1)
    assert any(fault in found for found in pages.faults(broken))


def test_whatever_is_shown_is_text():
    evil = '</script><script>alert("1")</script><img src=x onerror=y>&'
    drawn = bars("a", evil, evil, [Bar(evil, ((0, 1.0),), evil)], [(0, evil)])
    page = document(evil, evil, [tag("p", evil, title=evil), drawn, data(evil, evil, "/x")], {"x": evil})
    assert pages.faults(page) == []
    assert pages.carried(page) == {"x": evil}


def luminance(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_words_and_pictures_stand_out_from_the_paper(scheme):
    blocks = re.findall(r":root\{([^}]*)\}", _CSS)
    assert len(blocks) == 2
    colours = dict(re.findall(r"--(\w+):(#[0-9a-f]{3,6})", blocks[scheme]))
    colours = {name: "#" + "".join(c * 2 for c in v[1:]) if len(v) == 4 else v for name, v in colours.items()}
    for paper in ("paper", "panel"):
        for name in set(colours) - {"paper", "panel", "rule"}:
            dark, light = sorted(luminance(colours[which]) for which in (paper, name))
            least = 3 if re.fullmatch(r"c\d", name) else 4.5  # WCAG 2.2: 1.4.11 for graphics, 1.4.3 for text
            assert (light + 0.05) / (dark + 0.05) >= least, (name, paper)
