"""Units: what is accepted, what is refused, and that printing loses under half a per cent."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell import units
from foretell.errors import InputError

ACCEPTED = [
    (units.parse_bytes, "80GB", 80e9),
    (units.parse_bytes, "80 GiB", 80 * 2**30),
    (units.parse_bytes, "512KiB", 512 * 1024),
    (units.parse_bytes, " 1.5 kB ", 1500),
    (units.parse_bytes, "7 bytes", 7),
    (units.parse_bytes, "81559 MiB", 81559 * 1024**2),
    (units.parse_bandwidth, "3.35TB/s", 3.35e12),
    (units.parse_bandwidth, "900 GB/s", 900e9),
    (units.parse_bandwidth, "400Gb/s", 50e9),
    (units.parse_bandwidth, "100 Gbps", 12.5e9),
    (units.parse_bandwidth, "1 GiB/s", 2**30),
    (units.parse_flops, "989 TFLOP/s", 989e12),
    (units.parse_flops, "19.5TFLOPS", 19.5e12),
    (units.parse_flops, "624 TOPS", 624e12),
    (units.parse_time, "20us", 20e-6),
    (units.parse_time, "20 µs", 20e-6),
    (units.parse_time, "1.5 ms", 1.5e-3),
    (units.parse_time, "3 min", 180),
    (units.parse_frequency, "1410 MHz", 1.41e9),
    (units.parse_power, "10.2kW", 10200),
    (units.parse_money, "1999 USD", 1999),
    (units.parse_money_per_hour, "4.10 USD/h", 4.1),
]


@pytest.mark.parametrize(("parse", "text", "value"), ACCEPTED)
def test_accepted(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-12)


REFUSED = [
    (units.parse_bytes, "80", "no unit"),
    (units.parse_bytes, 80, "no unit"),
    (units.parse_bytes, "GB", "not a number"),
    (units.parse_bytes, "", "not a number"),
    (units.parse_bytes, "80 Gb", "wrong unit 'Gb'"),  # bits hold no memory
    (units.parse_bytes, "80gb", "wrong unit 'gb'"),
    (units.parse_bytes, "80 GB/s", "wrong unit 'GB/s'"),
    (units.parse_bytes, "-1 GB", "negative"),
    (units.parse_bytes, "-0 GB", "negative"),
    (units.parse_bytes, "nan GB", "not a number"),
    (units.parse_bytes, "inf GB", "not a number"),
    (units.parse_bytes, "1e400 B", "too large"),
    (units.parse_bytes, "1,000 GB", "wrong unit"),
    (units.parse_bandwidth, "900 GB", "wrong unit 'GB'"),
    (units.parse_flops, "19.5 TB/s", "wrong unit 'TB/s'"),
    (units.parse_time, "3 fortnights", "wrong unit"),
    (units.parse_frequency, "1410 MW", "wrong unit"),
    (units.parse_power, "400 V", "wrong unit"),
    (units.parse_money, "10 EUR", "wrong unit"),
    (units.parse_money_per_hour, "10 USD", "wrong unit"),
]


@pytest.mark.parametrize(("parse", "text", "why"), REFUSED)
def test_refused_with_what_is_accepted(parse, text, why):
    with pytest.raises(InputError) as caught:
        parse(text, where="file.toml: memory")
    assert why in caught.value.message
    assert caught.value.message.startswith("file.toml: memory: ")
    # The repair shows an example that this very parser takes.
    examples = caught.value.hint.split("'")[1::2]
    assert examples
    assert all(parse(example) > 0 for example in examples)


positive = st.floats(1e-3, 1e17)


@given(positive)
def test_printed_rates_and_bytes_read_back(value):
    assert units.parse_bandwidth(units.format_rate(value)) == pytest.approx(value, rel=0.006)
    if value >= 1:
        size = units.parse_bytes(units.format_bytes(value))
        assert size == pytest.approx(value, rel=0.006, abs=1)
    rate = units.format_rate(value, "FLOP")
    assert units.parse_flops(rate) == pytest.approx(value, rel=0.006)


@given(st.floats(1e-9, 59))
def test_printed_times_read_back(value):
    assert units.parse_time(units.format_time(value)) == pytest.approx(value, rel=0.006)


@given(st.floats(60, 1e7))
def test_long_times_are_within_their_last_place(value):
    text = units.format_time(value).replace(" d", " d ").split()
    total = sum(units.parse_time(number + unit) for number, unit in zip(text[::2], text[1::2], strict=True))
    assert total == pytest.approx(value, rel=0.03)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_bytes(80 * 2**30), "80 GiB"),
        (units.format_bytes(1023.9), "1 KiB"),
        (units.format_bytes(1000), "1000 B"),
        (units.format_bytes(0), "0 B"),
        (units.format_rate(999.96e9), "1 TB/s"),
        (units.format_flops(8.178e9), "8.18 GFLOP"),
        (units.format_count(25557032), "25.6 M"),
        (units.format_count(7), "7"),
        (units.format_count(-1234), "-1.23 k"),
        (units.format_time(0.0123), "12.3 ms"),
        (units.format_time(59.97), "1 min 0 s"),
        (units.format_time(3599.7), "1 h 0 min"),
        (units.format_time(10 * 86400), "10.0 d"),
        (units.format_time(math.inf), "inf s"),
        (units.format_energy(0.5), "500 mJ"),
        (units.format_energy(1200), "1.2 kJ"),
        (units.format_energy(7.2e6), "2 kWh"),
        (units.format_money(12.3), "$12.30"),
        (units.format_money(0.999), "$1.00"),
        (units.format_money(0.0123), "$0.012"),
        (units.format_money(0), "$0.00"),
        (units.format_power(1000), "1 kW"),
    ],
)
def test_printed(text, expected):
    assert text == expected
