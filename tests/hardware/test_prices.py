"""Prices: dated, sourced, overridable, and never a silent zero."""

from __future__ import annotations

import contextlib
import datetime

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from capibara.hardware import Price, PriceError, UnknownPriceError, get_chip, get_price, load_prices

ROW = """
[[price]]
chip = "v4"
region = "us-central2"
term = "on-demand"
usd_per_chip_hour = 2.5
as_of = 2026-10-01
source = "our contract"
"""


@pytest.fixture(autouse=True)
def _no_user_file(monkeypatch):
    monkeypatch.delenv("CAPIBARA_PRICES", raising=False)


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "prices.toml"

    def write(text: str):
        path.write_text(text)
        return path

    return write


def test_packaged_prices_are_dated_and_sourced():
    prices = load_prices()
    assert len(prices) > 10
    for price in prices:
        assert get_chip(price.chip).name == price.chip
        assert 0 < price.usd_per_chip_hour < 100
        assert datetime.date(2022, 1, 1) <= price.as_of
        assert len(price.source) > 10
        assert price.own is False
        assert price.region in str(price)


def test_spot_is_cheaper_than_on_demand():
    by_key = {(p.chip, p.region, p.term): p.usd_per_chip_hour for p in load_prices()}
    spots = [key for key in by_key if key[2] == "spot"]
    pairs = [(by_key[key], by_key[key[0], key[1], "on-demand"]) for key in spots]
    assert len(pairs) >= 4
    assert all(spot < on_demand for spot, on_demand in pairs)


def test_get_price():
    price = get_price("v4")
    assert (price.chip, price.region, price.usd_per_chip_hour) == ("tpu-v4", "us-central2", 3.22)
    assert get_price(get_chip("tpu-v4-core")).chip == "tpu-v4"
    assert get_price("v5e", region="europe-west4").usd_per_chip_hour == 1.56
    # Without a region: the lowest.
    assert get_price("v6e", term="spot").usd_per_chip_hour == min(
        p.usd_per_chip_hour for p in load_prices() if p.chip == "tpu-v6e" and p.term == "spot"
    )


def test_unknown_is_said_not_zero():
    with pytest.raises(UnknownPriceError, match=r"nvidia-h100-pcie.*none.*CAPIBARA_PRICES") as caught:
        get_price("h100-pcie")
    assert isinstance(caught.value, LookupError)
    with pytest.raises(UnknownPriceError, match=r"region 'mars'.*us-central2 on-demand"):
        get_price("v4", region="mars")
    with pytest.raises(UnknownPriceError, match="committed-3y"):
        get_price("v4", term="committed-3y")


def test_bad_term():
    with pytest.raises(PriceError, match="Did you mean 'on-demand'"):
        get_price("v4", term="on_demand")


def test_cost():
    price = Price("tpu-v4", "r", "spot", 2.0, datetime.date(2026, 1, 1), "s")
    assert price.cost(chips=32, hours=1.5) == pytest.approx(96.0)
    assert price.cost(0, 5) == 0
    for chips, hours in ((-1, 1), (1, -1), (float("nan"), 1), (1, float("inf"))):
        with pytest.raises(PriceError):
            price.cost(chips, hours)


def test_own_file_overrides_and_adds(own):
    path = own(ROW + ROW.replace('"v4"', '"H200"').replace("2.5", "0"))
    price = get_price("v4", path=path)
    assert (price.usd_per_chip_hour, price.source, price.own) == (2.5, "our contract", True)
    assert price.as_of == datetime.date(2026, 10, 1)
    assert get_price("h200", path=path).usd_per_chip_hour == 0  # a stated 0 is a price
    assert get_price("v4", term="spot", path=path).own is False  # other rows stay
    assert len(load_prices(path)) == len(load_prices()) + 1


def test_own_prices_come_before_cheaper_packaged_ones(own):
    path = own(ROW.replace("us-central2", "home").replace("2.5", "9.0"))
    assert get_price("v4", path=path).usd_per_chip_hour == 9.0
    assert get_price("v4", region="us-central2", path=path).usd_per_chip_hour == 3.22


def test_environment_variable(own, monkeypatch):
    monkeypatch.setenv("CAPIBARA_PRICES", str(own(ROW)))
    assert get_price("v4").usd_per_chip_hour == 2.5
    monkeypatch.setenv("CAPIBARA_PRICES", "/nowhere/prices.toml")
    with pytest.raises(PriceError, match=r"/nowhere/prices\.toml"):
        get_price("v4")


def test_a_date_may_be_a_string(own):
    assert get_price("v4", path=own(ROW.replace("2026-10-01", '"2026-10-01"'))).as_of.year == 2026


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('chip = "v4"', 'chip = "v44"', "Did you mean"),
        ('chip = "v4"', "chip = 4", "chip = 4, expected a string"),
        ('region = "us-central2"', 'region = ""', "region"),
        ('"on-demand"', '"ondemand"', "Did you mean 'on-demand'"),
        ("2.5", "-1", "usd_per_chip_hour = -1"),
        ("2.5", "nan", "usd_per_chip_hour = nan"),
        ("2.5", "true", "usd_per_chip_hour = True"),
        ("2.5", '"2.5"', "usd_per_chip_hour = '2.5'"),
        ("2026-10-01", '"soon"', "as_of = 'soon'"),
        ("2026-10-01", "2026-10-01T10:00:00", "as_of"),
        ("2026-10-01", "20261001", "as_of"),
        ('source = "our contract"', "", "'source' is missing"),
        ("usd_per_chip_hour", "usd_per_chip_hou", "Did you mean 'usd_per_chip_hour'"),
        ('source = "our contract"', 'source = "x"\ndated_by = "me"', "dated_by"),
        ("[[price]]", "[price]", "[[price]]"),
        ("[[price]]", "[[prices]]", "Did you mean 'price'"),
    ],
)
def test_bad_rows(own, old, new, expected):
    with pytest.raises(PriceError) as caught:
        load_prices(own(ROW.replace(old, new)))
    assert expected in str(caught.value)
    assert "prices.toml" in str(caught.value)


def test_a_bad_row_is_named_by_its_number(own):
    with pytest.raises(PriceError, match="price 2"):
        load_prices(own(ROW + ROW.replace("2.5", "-2")))


def test_a_binary_price_file(tmp_path):
    (tmp_path / "p.toml").write_bytes(b"\x00\xff\x00")
    with pytest.raises(PriceError, match="binary"):
        load_prices(tmp_path / "p.toml")


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            key: st.text(max_size=6)
            | st.integers(-5, 5)
            | st.booleans()
            | st.lists(st.integers(), max_size=2)
            for key in ("chip", "region", "term", "usd_per_chip_hour", "as_of", "source", "dated_by", "junk")
        },
    )
)
def test_any_row_is_a_price_or_a_price_error(tmp_path_factory, row):
    import tomli_w

    path = tmp_path_factory.mktemp("p") / "p.toml"
    path.write_text(tomli_w.dumps({"price": [row]}), encoding="utf-8")
    with contextlib.suppress(PriceError):
        assert len(load_prices(path)) >= len(load_prices())


def test_a_chip_without_a_price_says_since_when():
    with pytest.raises(
        UnknownPriceError, match=r"tpu-v7x.*by 2026-11-28 none was found\. Google's page.*CAPIBARA_PRICES"
    ):
        get_price("v7x")
    with pytest.raises(UnknownPriceError) as error:  # of others nothing is claimed
        get_price("a100")
    assert "none was found" not in str(error.value)


def test_a_price_of_ones_own_stands_for_a_chip_without_one(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(
        '[[price]]\nchip = "v7x"\nregion = "us-central1"\nterm = "on-demand"\nusd_per_chip_hour = 9.5\n'
        'as_of = 2026-11-28\nsource = "our contract"\n'
    )
    assert get_price("v7x", path=path).usd_per_chip_hour == 9.5
    path.write_text(path.read_text() + '[unpriced.tpu-v4]\nas_of = 2026-11-28\nwhy = "x"\n')
    with pytest.raises(PriceError, match="unknown key 'unpriced'"):
        load_prices(path)
