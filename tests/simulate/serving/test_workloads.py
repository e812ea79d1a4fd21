"""Traces: every reader on a file of its published schema, the measured ones against what their authors report."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from foretell.errors import ForetellError, InputError, UnknownNameError
from foretell.simulate.serving.workloads import Trace, Wanted, read, reader, readers, replayed
from foretell.simulate.serving.workloads.prefixes import shared_prefixes
from foretell.simulate.serving.workloads.shaping import faster

DATA = Path(os.environ.get("FORETELL_DATA") or Path("..") / "shared" / "data")
needs_azure = pytest.mark.skipif(not (DATA / "azure-llm-2023").is_dir(), reason="no azure-llm-2023 in $FORETELL_DATA")
needs_servegen = pytest.mark.skipif(not (DATA / "servegen").is_dir(), reason="no servegen in $FORETELL_DATA")

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = [
    {"timestamp": 27482, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 2353]},
    {"timestamp": 30535, "input_length": 1472, "output_length": 26, "hash_ids": [46, 47, 2366]},
]
#: As its README shows them; the second goes on from the first's chat, the third has a block of the first elsewhere.
BAILIAN = [
    {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 132,
     "type": "text", "turn": 1, "hash_ids": [1089, 1090, 6326]},
    {"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 64, "output_length": 9,
     "type": "text", "turn": 2, "hash_ids": [1089, 1090, 7, 8]},
    {"chat_id": 161, "parent_chat_id": -1, "timestamp": 63.0, "input_length": 20, "output_length": 3,
     "type": "search", "turn": 1, "hash_ids": [1090, 1089]},
]  # fmt: skip
CHAT = [
    {"id": "a", "conversations": [{"from": "human", "value": "x" * 400}, {"from": "gpt", "value": "y" * 42}]},
    {"id": "b", "conversations": [{"from": "human", "value": "only asked"}]},
    {"id": "c", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u" * 8},
                             {"role": "assistant", "content": "a"}]},
]  # fmt: skip
GUIDELLM = {"benchmarks": [
    {"requests": {"successful": [], "incomplete": [], "errored": []}},
    {"requests": {
        "successful": [
            {"prompt_tokens": 10, "output_tokens": 5, "request_start_time": 1005.5},
            {"prompt_tokens": 20, "output_tokens": 6, "request_start_time": 1005.0},
        ],
        "incomplete": [{"prompt_tokens": 1}], "errored": [{}, {}],
    }},
]}  # fmt: skip
VLLM = {"num_prompts": 4, "request_throughput": 1.0, "input_lens": [10, 20, 30, 40], "output_lens": [1, 0, 3, 4],
        "start_times": [100.0, 101.0, 103.5, 104.0], "errors": ["", "", "", "timed out"]}  # fmt: skip
#: A file of each kind: its text, arrivals (None: no times), input and output tokens, and what is skipped.
FILES = {
    "azure": (AZURE, [0, 4.314579, 4.541877], [374, 396, 879], [44, 109, 55], 0),
    "burstgpt": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n118,GPT-4,417,276,693,API log",
        [0, 113], [472, 417], [18, 276], 1,
    ),
    "mooncake": ("\n".join(map(json.dumps, MOONCAKE)), [0, 3.053], [1300, 1472], [52, 26], 0),
    "bailian": ("\n".join(map(json.dumps, BAILIAN)), [0, 1.386, 1.886], [40, 64, 20], [132, 9, 3], 0),
    "sharegpt": (json.dumps(CHAT), None, [100, 2], [10, 1], 1),
    "guidellm": (json.dumps(GUIDELLM), [0, 0.5], [20, 10], [6, 5], 3),
    "vllm": (json.dumps(VLLM), [0, 3.5], [10, 30], [1, 3], 2),
    "plain": ("arrival_s,input_tokens,output_tokens\n1.5,10,20\n2,30,40\n", [0, 0.5], [10, 30], [20, 40], 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_file_of_each_kind(kind: str, packed: bool, named: bool, tmp_path: Path) -> None:
    text, arrival, asked, answered, skipped = FILES[kind]
    path = tmp_path / "trace.txt"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    part = "#2" if kind == "guidellm" else ""
    trace = read(f"{kind}:{path}{part}" if named else f"{path}{part}")
    assert trace.about["kind"] == kind
    if arrival is None:
        assert trace.arrival_s is None
    else:
        assert trace.arrival_s is not None
        assert trace.arrival_s.tolist() == pytest.approx(arrival, abs=1e-6)
    assert trace.input_tokens.tolist() == asked
    assert trace.output_tokens.tolist() == answered
    assert sum(trace.skipped.values()) == skipped


def test_later_files_of_a_kind(tmp_path: Path) -> None:
    """BurstGPT's third file has two more columns, and GuideLLM's first versions another name of the time."""
    path = tmp_path / "trace"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "7,a1b2,3.5,ChatGPT,472,18,490,Conversation log\n9,a1b2,4,GPT-4,10,20,30,API log\n"
    )
    trace = read(str(path))
    assert trace.about["kind"] == "burstgpt"
    assert (trace.arrival_s is not None and trace.arrival_s.tolist()) == [0.0, 2.0]
    assert trace.input_tokens.tolist() == [472, 10]
    good = [{"prompt_tokens": 10, "output_tokens": 5, "start_time": 3.0},
            {"prompt_tokens": 20, "output_tokens": 6, "info": {"timings": {"request_start": 4.5}}}]  # fmt: skip
    path.write_text(json.dumps({"benchmarks": [{"requests": {"successful": good}}]}))
    trace = read(str(path))
    assert (trace.arrival_s is not None and trace.arrival_s.tolist()) == [0.0, 1.5]


def test_blocks_by_themselves_share_only_beginnings(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, BAILIAN)))
    trace = read(str(path))
    assert trace.prefix_tokens.tolist() == [32, 32, 0]
    assert trace.prefix[0] == trace.prefix[1] != 0


def test_every_reader_is_tested() -> None:
    assert set(readers()) == {*FILES, "servegen"}
    with pytest.raises(ForetellError, match="registered already"):
        reader("azure", looks=lambda head: False, source="")(lambda source, wanted: read("x"))


@needs_azure
def test_the_azure_traces_have_the_medians_that_were_published() -> None:
    """Splitwise (ISCA 2024), section III: medians of 1,020 and 129 tokens in conversations, 1,500 and 13 in code."""
    for spec, count, asked, answered in (("azure:conv.csv", 19366, 1020, 129), ("azure:code", 8819, 1500, 13)):
        trace = read(spec)
        assert len(trace) == count
        assert np.median(trace.input_tokens) == pytest.approx(asked, rel=0.03)  # 1,500 is rounded
        assert np.median(trace.output_tokens) == pytest.approx(answered, rel=0.02)
        assert trace.arrival_s is not None
        assert 3400 < trace.arrival_s[-1] < 3600


@needs_azure
def test_a_part_of_a_trace() -> None:
    whole = read("azure:conv.csv")
    part = read("azure:conv.csv", Wanted(start_s=600, duration_s=60))
    assert whole.arrival_s is not None
    assert part.arrival_s is not None
    inside = (whole.arrival_s >= 600) & (whole.arrival_s < 660)
    assert part.arrival_s.tolist() == pytest.approx((whole.arrival_s[inside] - 600).tolist())
    assert "from 600 s on until 660 s" in part.about["part"]
    assert len(read("azure:conv.csv", Wanted(limit=7))) == 7
    with pytest.raises(InputError, match="no request from 9999 s"):
        read("azure:conv.csv", Wanted(start_s=9999))


@needs_servegen
def test_drawn_requests_follow_the_rates_and_lengths_they_are_drawn_from() -> None:
    """The file's own numbers: expected counts in ten-minute windows, and means of the histograms."""
    import csv
    import re

    name = DATA / "servegen" / "reason-deepseek-r1"
    with gzip.open(f"{name}_client_rate_traces.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    with gzip.open(f"{name}_length_distributions.json.gz", "rt") as file:
        lengths = json.load(file)
    expected = dict.fromkeys(range(0, 3600, 600), 0.0)
    tokens = 0.0
    for row in rows:
        if float(row["timestamp_s"]) in expected:
            count = 600 * float(row["rate_req_per_s"])
            expected[int(float(row["timestamp_s"]))] += count
            if count:
                bins = re.findall(r"(\d+): ([0-9.e-]+)", lengths[row["client"]]["0"]["output_tokens"])
                weights = [float(share) for _, share in bins]
                tokens += count * sum(int(v) * w for (v, _), w in zip(bins, weights, strict=True)) / sum(weights)
    trace = read("servegen:deepseek-r1", Wanted(duration_s=3600, seed=3))
    assert trace.arrival_s is not None
    got = np.histogram(trace.arrival_s, bins=range(0, 3601, 600))[0]
    for window, count in zip(expected.values(), got, strict=True):
        assert count == pytest.approx(window, abs=8 * np.sqrt(window))
    assert trace.output_tokens.sum() == pytest.approx(tokens, rel=0.02)
    again = read("servegen:deepseek-r1", Wanted(duration_s=3600, seed=3))
    assert again.arrival_s is not None
    assert again.arrival_s.tobytes() == trace.arrival_s.tobytes()
    other = read("servegen:deepseek-r1", Wanted(duration_s=3600, seed=4))
    assert len(other) != len(trace)


@needs_servegen
def test_statistics_without_lengths_say_so() -> None:
    from foretell.simulate.serving.workloads import parse_lengths

    with pytest.raises(InputError, match=r"no lengths beside it.*--isl"):
        read("servegen:m-small", Wanted(duration_s=60))
    trace = read("servegen:m-small", Wanted(limit=100, lengths=parse_lengths("100", "10")))
    assert set(trace.input_tokens.tolist()) == {100}
    with pytest.raises(InputError, match=r"there are .*mm-image"):
        read("servegen:nothing")


RATES = "client,timestamp_s,rate_req_per_s,cv,arrival_distribution,param1,param2\n"


@pytest.mark.parametrize(("row", "cv"), [("0,0,20,0.5,Gamma,4,0", 0.5), ("0,0,20,9,Weibull,0.5,0", 5**0.5),
                                         ("0,0,20,1,,0,0", 1.0)])  # fmt: skip
def test_gaps_of_a_client_vary_as_the_file_says(row: str, cv: float, tmp_path: Path) -> None:
    path = tmp_path / "x_client_rate_traces.csv"
    path.write_text(RATES + row)
    (tmp_path / "x_length_distributions.json").write_text(
        json.dumps({"0": {"0": {"text_tokens": "{100: 1.0}", "image_tokens": "{7: 1.0}", "image_count": "{3: 1.0}",
                                "output_tokens": "{5: 0.5, 0: 0.5}"}}})
    )  # fmt: skip
    trace = read(str(path))
    assert trace.arrival_s is not None
    gaps = np.diff(trace.arrival_s)
    # Half of the arrivals are left out, as their output has 0 tokens: their gaps are added to the next.
    kept = np.sqrt((cv**2 + 1) / 2)  # variation of a geometric sum of gaps, with a half chance to go on
    assert gaps.std() / gaps.mean() == pytest.approx(kept, rel=0.06)
    assert len(trace) == pytest.approx(6000, rel=0.12)
    assert set(trace.input_tokens.tolist()) == {121}
    assert sum(trace.skipped.values()) == pytest.approx(6000, rel=0.12)


def test_prompts_that_begin_alike() -> None:
    trace_like = [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 9], [1, 9, 8], [7]]
    ids, tokens, kept = shared_prefixes(trace_like, [1024, 2048, 2560, 1024, 1500, 512], 512)
    # The conversation 1 2 3 4 is one path; 1 9 another, which shares a block with it that is lost once.
    assert ids.tolist() == [1, 1, 1, 2, 2, 0]
    assert tokens.tolist() == [1024, 2048, 2048, 1024, 1024, 0]
    # A cache without limit finds 1024, 2048, 512 and 1024 tokens; one that knows only the ids, no 512.
    assert "keeps 89 %" in kept  # 4096 of 4608


def test_a_prompt_continues_on_the_branch_that_saves_most() -> None:
    chains = [[1], [1], [1, 2, 3], [1, 2, 3], [1, 5], [1, 5]]
    ids, tokens, _ = shared_prefixes(chains, [2000] * 6, 512)
    assert tokens.tolist() == [512, 512, 1536, 1536, 1024, 1024]
    assert ids[0] == ids[2] != ids[4]  # 1 goes on to 2 and 3, which are longer than 5


def test_the_rate_is_right_for_clients_that_send_little(tmp_path: Path) -> None:
    """3,000 windows with one request each on average: as many as expected, though none begins with one."""
    from foretell.simulate.serving.workloads import parse_lengths

    path = tmp_path / "x_client_rate_traces.csv"
    lines = [f"{client},{begin},{1 / 600},{cv},{kind},0.7,0" for client, (cv, kind) in
             enumerate([(0.5, "Gamma"), (2, "Gamma"), (1, "Weibull")]) for begin in range(0, 600_000, 600)]  # fmt: skip
    path.write_text(RATES + "\n".join(lines))
    trace = read(str(path), Wanted(lengths=parse_lengths("5", "5")))
    assert len(trace) == pytest.approx(3000, abs=5 * 2 * 3000**0.5)
    assert trace.arrival_s is not None
    assert np.histogram(trace.arrival_s % 600, bins=4)[0].tolist() == pytest.approx([750] * 4, abs=5 * 2 * 750**0.5)


def test_mooncake_prefixes_reach_the_requests(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    requests = replayed(read(str(path)))
    assert requests.prefix.tolist() == [1, 1]
    assert requests.prefix_tokens.tolist() == [1024, 1024]
    assert "1.02 k of 2.77 k input tokens" in requests.about["prefixes"]


BAD = """arrival_s,input_tokens,output_tokens
1,10,20
-3,10,20
2,10,0
0.5,10,20
3,,20
nan,10,20
4,10,many
5,10
6,0,20
1e300,10,20
7,10.5,20
7,10,1e30
7,10,2.5
7,1,000,20
"""


def test_rows_that_are_no_requests_are_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(BAD)
    trace = read(str(path))
    assert dict(trace.skipped) == {
        "a negative time, first at row 3": 1, "an output of 0 tokens, first at row 4": 1,
        "no input length, first at row 6": 1, "no time, first at row 7": 1, "no output length, first at row 8": 2,
        "an input of 0 tokens, first at row 10": 1, "a time above 1e+10 s, first at row 11": 1,
        "an input of no whole number of tokens, first at row 12": 1,
        "an output of more than 2,147,483,648 tokens, first at row 13": 1,
        "an output of no whole number of tokens, first at row 14": 1,
        "more cells than columns, first at row 15": 1,
    }  # fmt: skip
    assert trace.about["order"] == "1 row was earlier than the row before, first row 5: sorted"
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 0.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s,input_tokens\n1,2\n", "has arrival_s, input_tokens; nearest is plain, .* lacks output_tokens"),
        ("TIMESTAMP,ContextTokens\n", "nearest is azure, for which it lacks GeneratedTokens"),
        ("Timestamp,Request tokens,Total tokens\n", "nearest is burstgpt, for which it lacks Response tokens"),
        ('{"timestamp": 1, "input_length": 2}\n', "nearest is mooncake, for which it lacks output_length"),
        ("Arrival_S,Input_Tokens,Output_Tokens\n", "nearest is plain, for which it lacks input_tokens, output_tokens"),
        ("arrival_s;input_tokens;output_tokens\n1;2;3\n", "separated by semicolons, not commas"),
        ("a,b\n1,2\n", "known: it has a, b; give columns"),
        ("\0\1", "it is no UTF-8 text"),
        ("", "it is empty"),
        ("input_tokens,output_tokens,input_tokens\n1,2,3\n", "row 1: two columns input_tokens; leave one of them"),
        ("arrival_s,input_tokens,output_tokens\n", "no row is a request, it is empty"),
        ("arrival_s,input_tokens,output_tokens\n-1,2,0\n", "no row is a request: 1 with a negative time"),
        ('[{"input_tokens": 1, "output_tokens": 2},\n{"input_tokens": 1,,}]', "value 2: is no JSON"),
        ('{"input_tokens": 1,,}\n{"input_tokens": 1, "output_tokens": 2}', "value 1: is no JSON"),
        ('{"request_throughput": 3}', "only totals; .* with --save-detailed .SGLang: --output-details.$"),
        ('{"request_throughput": 3}\n', "only totals"),
        ('{"input_lens": [1, 2], "output_lens": [1, 2], "start_times": [0]}', "2 input_lens and 1 start_times"),
        ('{"input_lens": [1, 2], "output_lens": [1]}', "2 input_lens and 1 output_lens"),
        ('{"benchmarks": []}', "no list of benchmarks"),
        ('{"benchmarks": [{"requests": {}}]}', "no requests.successful"),
        ('{"benchmarks": [{}, {}]}', "name one of them: FILE#1"),
    ],
)
def test_files_that_are_no_trace(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read(str(path))


def test_what_is_no_file(tmp_path: Path) -> None:
    pipe, wide = tmp_path / "pipe", tmp_path / "wide.csv"
    os.mkfifo(pipe)
    wide.write_text("arrival_s,input_tokens,output_tokens\n1,2,3\n", encoding="utf-16")
    for spec, message in (
        (str(tmp_path), "is a directory"),
        (f"plain:{tmp_path}", "is a directory; write plain:FILE"),
        (f"azure:{tmp_path}", "is a directory"),
        ("plain:", "plain:: names no file; write plain:FILE"),
        (f"plain:{tmp_path / 'none.csv'}", "no such file"),
        (str(pipe), "a pipe can be read only once; write it to a file first"),
        (str(wide), "is UTF-16 text; save it as UTF-8"),
    ):
        with pytest.raises(InputError, match=message):
            read(spec)


def test_requests_know_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n2,10,1\n-1,1,1\n1,20,1\n3,30,1\n")
    trace = read(str(path))
    assert trace.row is not None
    assert trace.row.tolist() == [4, 2, 5]
    for requests, rows in (
        (replayed(trace), [4, 2, 5]),
        (replayed(read(str(path), Wanted(start_s=1.0))), [2, 5]),
        (replayed(trace, rate=1.0), [4, 2, 5]),
    ):
        assert requests.row is not None
        assert requests.row.tolist() == rows


def test_times_that_are_too_late_to_tell_iterations_apart(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,1\n1,1,1\n")
    with pytest.raises(InputError, match=r"the last arrives after 1e\+12 s; give times up to 1e\+10 s"):
        replayed(faster(read(str(path)), "1e-12x"))


def test_a_benchmark_with_totals_only_says_what_they_come_to(tmp_path: Path) -> None:
    """Without --save-detailed vllm bench serve leaves the lists of requests out."""
    path = tmp_path / "run.json"
    totals = {"num_prompts": 10, "completed": 8, "total_input_tokens": 8192, "total_output_tokens": 1600}
    path.write_text(json.dumps({**totals, "request_throughput": 2.5, "request_rate": "inf"}))
    with pytest.raises(InputError, match=r"--save-detailed.*: --rate 2.5 --isl 1024 --osl 200$"):
        read(str(path))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("broken", ['{"timestamp": 1, "input_le', "nonsense", '{"a": 1}'])
def test_a_broken_line_is_one_row_less(broken: str, ending: str, tmp_path: Path) -> None:
    good = [json.dumps(row) for row in MOONCAKE]
    for lines in ([good[0], broken, good[1]], [*good, broken]):
        path = tmp_path / "x.jsonl"
        path.write_text(ending.join(lines), newline="")
        trace = read(str(path))
        assert trace.input_tokens.tolist() == [1300, 1472]
        assert sum(trace.skipped.values()) == 1
        (reason,) = trace.skipped
        assert reason.startswith("no timestamp" if broken == '{"a": 1}' else "no JSON")


def test_missing_columns_and_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("TIMESTAMP,ContextTokens\n")
    with pytest.raises(InputError, match=r"row 1: no column GeneratedTokens; it has TIMESTAMP, ContextTokens"):
        read(f"azure:{path}")
    (tmp_path / "y.csv").write_text("input_tokens\n")
    with pytest.raises(InputError, match="no column output_tokens"):
        read(f"plain:{tmp_path / 'y.csv'}")
    with pytest.raises(UnknownNameError, match="did you mean 'azure'"):
        read("azzure:conv.csv")
    with pytest.raises(InputError, match="no such file"):
        read(str(tmp_path / "none.csv"))
    path.write_bytes(gzip.compress(b"a,b\n" * 1000)[:-9])
    with pytest.raises(InputError, match="cannot be read to its end"):
        read(f"azure:{path}")
    with pytest.raises(InputError, match="number from 1 to 20,000,000"):
        Wanted(limit=0)


def test_a_long_file_is_streamed(tmp_path: Path) -> None:
    """Nothing is held but columns: 300,000 rows of 100 bytes of text each take far less than the file."""
    import tracemalloc

    path = tmp_path / "long.jsonl"
    row = json.dumps({"arrival_s": 1, "input_tokens": 5, "output_tokens": 6, "text": "z" * 100})
    path.write_text((row + "\n") * 300_000)
    tracemalloc.start()
    trace = read(str(path))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace) == 300_000
    assert most < 40 * 300_000 * 3 < path.stat().st_size + 10e6
    first = read(str(path), Wanted(limit=10))
    assert "the file has more" in first.about["cut"]
    assert len(first) == 10


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "line.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "1" * (17 * 2**20))
    with pytest.raises(InputError, match="line 2 is longer than 16 MiB"):
        read(str(path))


def test_speeding_up_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n4,1,1\n8,1,1\n")
    trace = read(str(path))
    for scale, last in (("2x", 4.0), ("0.5x", 16.0), ("10/s", 0.2)):
        made = faster(trace, scale)
        assert made.arrival_s is not None
        assert made.arrival_s[-1] == pytest.approx(last)
    for scale in ("2", "-1x", "x", "0x", "fast"):
        with pytest.raises(InputError, match="is no scale"):
            faster(trace, scale)
    untimed = Trace(None, trace.input_tokens, trace.output_tokens, trace.prefix, trace.prefix_tokens)
    with pytest.raises(InputError, match="no times to scale"):
        faster(untimed, "2x")
    with pytest.raises(InputError, match="give --rate"):
        replayed(untimed)
    assert replayed(untimed, rate=2.0, process="constant").arrival_s.tolist() == [0.0, 0.5, 1.0]


def test_prefixes_of_a_plain_table(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    rows = ("10,1,4,8", "20,1,,", "30,1,4,-1", "5,1,4,8", "9,1,chat a,8", "9,1,chat b,8", "9,1,chat a,7", "9,1,,8")
    path.write_text("\n".join(("input_tokens,output_tokens,prefix,prefix_tokens", *rows)))
    trace = read(str(path))
    first, second = trace.prefix[3:5].tolist()  # what a text is called matters to nobody
    assert trace.prefix.tolist() == [4, 0, 4, first, second, first, 0]
    assert first != second
    assert min(first, second) > 10**18
    assert trace.prefix_tokens.tolist() == [8, 0, 5, 8, 8, 7, 0]
    assert trace.skipped == {"prefix_tokens that are no whole number from 0 on, first at row 4": 1}


def lines(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_hashes_that_are_none_are_told_of(tmp_path: Path) -> None:
    """Such prompts share nothing, which would read as if no two began alike."""
    plain = {"input_length": 1024, "output_length": 5}
    hashes: list[object] = [[1, 2], [1, 3], "x", [0, "a", None], [True], [1, 2.0]]
    rows = [{"timestamp": 10 * i, **plain, "hash_ids": one} for i, one in enumerate(hashes)]
    rows += [{"timestamp": 70, **plain}, {"timestamp": 80, **plain, "hash_ids": None}]
    trace = read(lines(tmp_path / "m.jsonl", rows))
    assert trace.prefix_tokens.tolist() == [512, 512, 0, 0, 0, 0, 0, 0]
    assert trace.about["prefixes"].endswith(
        "of them; 4 rows with hash_ids that are no list of whole numbers, first row 3, and 2 rows without hash_ids, "
        "first row 7, share nothing"
    )
    assert read(lines(tmp_path / "m.jsonl", rows[:2])).about["prefixes"].endswith("of them")
    none = read(lines(tmp_path / "m.jsonl", rows[6:7]))
    said = "no prompt begins as another does; 1 row without hash_ids, first row 1, shares nothing"
    assert none.about["prefixes"] == said


def test_seconds_are_not_taken_for_milliseconds(tmp_path: Path) -> None:
    rows = [{key: value for key, value in row.items() if key != "parent_chat_id"} for row in BAILIAN]
    path = lines(tmp_path / "b.jsonl", rows)
    with pytest.raises(InputError, match=r"row 1: timestamp 61\.114 is no whole millisecond.*bailian:FILE"):
        read(path)
    trace = read(f"bailian:{path}")
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == pytest.approx([0, 1.386, 1.886])
    said = read(f"mooncake:{path}")  # other writers of the format have fractions
    assert said.arrival_s is not None
    assert said.arrival_s.tolist() == pytest.approx([0, 1.386e-3, 1.886e-3])
    assert said.prefix_tokens.tolist() == [40, 64, 0]  # and hashes of blocks by themselves: these two begin alike


def test_a_prefix_without_its_length_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("input_tokens,output_tokens,prefix\n10,1,4\n20,1,4\n")
    trace = read(str(path))
    assert trace.about["prefixes"] == "no column prefix_tokens beside prefix: nothing is shared"
    assert trace.prefix_tokens.tolist() == [0, 0]
    path.write_text('{"input_tokens": 10, "output_tokens": 1, "prefix_tokens": 4}\n')
    assert read(str(path)).about["prefixes"] == "no column prefix beside prefix_tokens: nothing is shared"


def test_a_quote_that_is_never_closed(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    head = "arrival_s,input_tokens,output_tokens,note\n1,10,20,a\n"
    rows = "".join(f"{i},10,20,b\n" for i in range(2, 100))
    path.write_text(f'{head}2,"10,20,b\n{rows}')
    with pytest.raises(InputError, match=r"row 3: a quote that is never closed; close it"):
        read(str(path))
    path.write_text(f'{head}2,"10,20,b\n{rows * 200}')
    with pytest.raises(InputError, match=r"row 3: a cell longer than 131,072 characters; close its quote, or shorten"):
        read(str(path))
    # A note over several lines is a cell as any other, and its row that of its first line.
    path.write_text(f'{head}2,30,40,"b\nc\n""d"""\nx,1,1,e\n3,50,60,"f\ng"')
    trace = read(str(path))
    assert trace.input_tokens.tolist() == [10, 30, 50]
    assert trace.row is not None
    assert trace.row.tolist() == [2, 3, 7]
    assert trace.skipped == {"no time, first at row 6": 1}


def test_a_value_without_end_says_how_long_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "line.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": [' + "1," * (9 * 2**20))
    with pytest.raises(InputError, match="value 1: is no JSON, or longer than 16 MiB"):
        read(str(path))


def test_names_of_files_are_no_commands_to_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31mb\nc.csv"
    path.write_text("input_tokens,output_tokens\n10,1\n")
    assert read(str(path)).about["trace"] == f"{tmp_path}/a?[31mb?c.csv"
