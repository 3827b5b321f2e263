"""Numbers and dates as people write them: against Babel's locales and Python's own calendar."""

import csv
from dataclasses import replace
from datetime import date, timedelta

import numpy as np
import pytest

from leakbound.data import Schema, load
from leakbound.data.values import NumberFormat, formats_of
from leakbound.domains import Column

LOCALES = (
    *("de_DE", "fr_FR", "de_CH", "en_US", "en_IN", "hi_IN", "ar_EG", "fa_IR", "sv_SE", "pl_PL"),
    *("pt_BR", "bn_BD", "mr_IN", "ne_NP", "he_IL", "my_MM", "th_TH", "ja_JP", "es_MX", "ur_PK"),
)


def write(path, *columns, delimiter=","):
    """A table of these columns (name, texts), and the label y, in quotes."""
    names = [name for name, _ in columns]
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter, quoting=csv.QUOTE_ALL)
        writer.writerow([*names, "y"])
        for k, row in enumerate(zip(*(texts for _, texts in columns), strict=True)):
            writer.writerow([*row, "ab"[k % 2]])
    return path


def drafted(tmp_path, *columns):
    """The draft's columns and notes, by name."""
    found = Schema.infer(write(tmp_path / "t.csv", *columns), "y")
    return {column.name: column for column in found.columns}, found.notes, found


def confirmed(tmp_path, found, **changes):
    """The values of the only column after the draft is confirmed."""
    column = replace(found.columns[0], **changes)
    replace(found, columns=(column,), confirmed=True).save(tmp_path / "t.toml")
    data = load(str(tmp_path / "t.csv"))
    kept = data.columns[0]
    return (kept.origin + kept.unit_length * data.inputs[:, 0].double()).numpy()


@pytest.mark.parametrize("locale", LOCALES)
def test_every_locale_is_read_as_a_number(locale, tmp_path):
    numbers = pytest.importorskip("babel.numbers")
    values = np.random.default_rng(0).uniform(-90_000, 9_000_000, 200).round(2)
    texts = [
        numbers.format_decimal(
            value, locale=locale, numbering_system="default", decimal_quantization=False
        )
        for value in values.tolist()
    ]
    columns, _, found = drafted(tmp_path, ("x", texts))
    column = columns["x"]
    assert (column.kind, column.low, column.high) == ("continuous", values.min(), values.max())
    assert np.abs(confirmed(tmp_path, found) - values).max() < 1e-6 * np.ptp(values)


@pytest.mark.parametrize("locale", LOCALES)
def test_every_locale_is_read_with_its_percent_sign(locale, tmp_path):
    numbers = pytest.importorskip("babel.numbers")
    values = np.random.default_rng(0).uniform(0, 99, 60).round(1)
    texts = [
        numbers.format_percent(value / 100, "#,##0.#\u00a0%", locale, numbering_system="default")
        for value in values.tolist()
    ]
    columns, notes, found = drafted(tmp_path, ("x", texts))
    assert (columns["x"].kind, columns["x"].unit) == ("continuous", "%")
    assert notes["x"].startswith("numbers in '%'")
    assert np.abs(confirmed(tmp_path, found) - values).max() < 1e-4
    assert found.columns[0].text(4.5) == "4.5 %"


@pytest.mark.parametrize("locale", sorted({*LOCALES} - {"de_CH", "es_MX"}))
def test_every_locale_is_read_with_its_currency(locale, tmp_path):
    """Two write EUR12.50, which nothing tells from a code such as LOT12."""
    numbers = pytest.importorskip("babel.numbers")
    values = np.random.default_rng(0).uniform(-2_000, 90_000, 60).round(2)
    texts = [numbers.format_currency(value, "EUR", locale=locale) for value in values.tolist()]
    columns, _, found = drafted(tmp_path, ("x", texts))
    assert (columns["x"].kind, columns["x"].unit) == ("continuous", "€")
    assert np.abs(confirmed(tmp_path, found) - values).max() < 1e-6 * np.ptp(values)


ZEROS = {"Arabic": 0x660, "Persian": 0x6F0, "Hindi": 0x966, "Bengali": 0x9E6, "Thai": 0xE50}
ZEROS |= {"full width": 0xFF10, "Khmer": 0x17E0, "Burmese": 0x1040, "Tibetan": 0xF20}


@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
def test_digits_of_every_script_are_read(zero, tmp_path):
    values = [k * 37 % 91 - 30 for k in range(91)]
    digits = {str(k): chr(zero + k) for k in range(10)} | {"-": "\u2212"}
    texts = ["".join(map(digits.__getitem__, str(value))) for value in values]
    columns, _, found = drafted(tmp_path, ("x", texts))
    assert (columns["x"].kind, columns["x"].low, columns["x"].high) == ("integer", -30, 60)
    assert confirmed(tmp_path, found).round().tolist() == values


@pytest.mark.parametrize(
    ("form", "unit", "decimal"),
    [
        ("{} kg", "kg", "."),
        ("{}kg/m2", "kg/m2", "."),
        ("{} µg/L", "µg/L", "."),
        ("{} °C", "°C", "."),
        ("{}\u2009\u2030", "\u2030", "."),
        ("%{}", "%", ","),  # Turkish
        ("US${}", "US$", "."),
        ("CHF {}", "CHF", "."),
        ("{} zł", "zł", ","),
        ("{}E-02", "", ","),
        ("\u200e{}\u200e", "", ","),
    ],
)
def test_units_and_marks_beside_a_number(form, unit, decimal, tmp_path):
    shift = 100 if "E-02" in form else 1
    values = [k * 1.37 % 40 / shift for k in range(80)]
    texts = [form.format(f"{value * shift:.2f}".replace(".", decimal)) for value in values]
    columns, notes, found = drafted(tmp_path, ("x", texts))
    assert (columns["x"].unit, columns["x"].decimal) == (unit, decimal)
    assert ("ask: numbers in" in notes.get("x", "")) == unit[:1].isalpha()
    assert np.allclose(confirmed(tmp_path, found), values, atol=0.006 / shift)


AMBIGUOUS = [f"{k % 90 + 10}.{k * 7 % 1000:03}" for k in range(60)]


def test_what_may_be_thousands_is_asked_and_the_answer_is_read(tmp_path):
    columns, notes, found = drafted(tmp_path, ("x", AMBIGUOUS))
    low, high = min(map(float, AMBIGUOUS)), max(map(float, AMBIGUOUS))
    assert (columns["x"].decimal, columns["x"].low, columns["x"].high) == (".", low, high)
    assert notes["x"] == (
        "ask: is '10.000' 10 or 10000? For the second: decimal = \",\", "
        f"low = {1000 * low:.12g}, high = {1000 * high:.12g}"
    )
    assert np.allclose(confirmed(tmp_path, found), list(map(float, AMBIGUOUS)), atol=1e-4)
    answer = {"decimal": ",", "low": 1000 * low, "high": 1000 * high, "kind": "integer"}
    thousands = confirmed(tmp_path, found, **answer, typical=None, spread=None)
    assert thousands.round().tolist() == [int(text.replace(".", "")) for text in AMBIGUOUS]


def test_one_certain_value_answers_the_question(tmp_path):
    for certain, decimal in (("0.125", "."), ("1.234.567", ","), ("12,5", ",")):
        columns, notes, _ = drafted(tmp_path, ("x", [*AMBIGUOUS, certain]))
        assert columns["x"].decimal == decimal
        assert "is '10.000'" not in notes.get("x", "")


def test_other_columns_say_which_mark_is_likely(tmp_path):
    """It is asked all the same."""
    for one, decimal in (("0,5", ","), ("0.5", ".")):
        columns, notes, _ = drafted(tmp_path, ("x", AMBIGUOUS), ("z", [one, "1"] * 30))
        assert (columns["x"].decimal, columns["z"].decimal) == (decimal, decimal)
        assert notes["x"].startswith(("ask: is '10.000' ", "a comma is the decimal mark; ask: is "))


@pytest.mark.parametrize("text", ["<0.5", "< 0.5", "≤0.5", "<=0.5", "=<0.5"])
def test_values_below_a_limit_are_asked_about(text, tmp_path):
    values = [text if k % 8 == 0 else f"{k % 7 + 1}.5" for k in range(80)]
    columns, notes, found = drafted(tmp_path, ("x", values))
    assert (columns["x"].kind, columns["x"].censored, columns["x"].low) == (
        "continuous",
        "limit",
        0.5,
    )
    assert f"ask: does {text!r} count as the limit?" in notes["x"]
    assert confirmed(tmp_path, found)[0] == 0.5
    confirmed(tmp_path, found, censored="missing", missing=True)
    data = load(str(tmp_path / "t.csv"))
    assert data.inputs[:, 1].tolist() == [float(k % 8 == 0) for k in range(80)]
    with pytest.raises(ValueError, match=r"line 2, column 'x': .* beyond a limit; set censored"):
        confirmed(tmp_path, found, censored="")


@pytest.mark.parametrize("text", [">120", "≥120", "120+", ">=120"])
def test_values_above_a_limit_are_asked_about(text, tmp_path):
    values = [text if k % 8 == 0 else str(k) for k in range(80)]
    columns, notes, _ = drafted(tmp_path, ("x", values))
    assert (columns["x"].kind, columns["x"].censored, columns["x"].high) == (
        "integer",
        "limit",
        120,
    )
    assert f"ask: does {text!r} count as the limit?" in notes["x"]


def test_what_is_no_limit_of_a_number(tmp_path):
    column = Column("x", low=0.0, high=9.0, censored="missing", missing=True)
    schema = Schema((column,), "y", ("a", "b"), confirmed=True)
    for text in ("<b5>", "<", "<5<", "5++", "<five"):
        write(tmp_path / "t.csv", ("x", ["1", text]))
        schema.save(tmp_path / "t.toml")
        with pytest.raises(ValueError, match="line 3, column 'x'"):
            load(str(tmp_path / "t.csv"))


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["0.5", "0,5"], "ask: numbers or dates in several forms, as '0.5', '0,5'? Write one"),
        (["5 kg", "7 lb"], "in several forms, as '5 kg', '7 lb'? Write one"),
        (
            ["2001-01-31", "31.01.2001"],
            "in several forms, as '2001-01-31', '31.01.2001'? Write one",
        ),
    ],
)
def test_two_forms_in_a_column_are_never_categories(texts, words, tmp_path):
    _, notes, found = drafted(tmp_path, ("x", texts * 20), ("z", ["1", "2"] * 20))
    assert found.ignore == ("x",)
    assert words in notes["x"]


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        (["10:30", "11:45", "12:00"], 0),
        (["[0-10)", "[10-20)"], 0),
        (["1/2", "3/4"], 0),
        (["(5)", "6", "7"], 2),
        (["N/A", "6", "7", "8"], 3),
        (["1st", "2nd", "3rd"], 3),
    ],
)
def test_categories_that_look_like_numbers_are_asked_about(texts, count, tmp_path):
    columns, notes, found = drafted(
        tmp_path, ("x", texts * 10), ("z", ["1", "2"] * (5 * len(texts)))
    )
    if count == len(texts):
        assert found.ignore == ("x",)
    else:
        assert columns["x"].kind == "categorical"
        assert f"ask: numbers? {10 * count} of {10 * len(texts)} values" in notes["x"]


def test_words_are_asked_about_nothing(tmp_path):
    for texts in (["red", "green"], ["A1", "B2"], ["=SUM(A1)", "@x"], ["note 5", "note 6"]):
        columns, notes, _ = drafted(tmp_path, ("x", texts * 10))
        assert columns["x"].kind == "categorical"
        assert "x" not in notes


def test_ninety_nine_percent_are_numbers_and_the_rest_is_listed(tmp_path):
    texts = [f"{k % 7},{k % 10}5" for k in range(397)]
    columns, notes, _ = drafted(tmp_path, ("x", [*texts, "1.2", "bad", "x5", "y6"]))
    assert (columns["x"].kind, columns["x"].decimal) == ("continuous", ",")
    assert notes["x"].endswith(
        "4 values are no number, such as '1.2' in line 399, 'bad' in line 400, 'x5' in line 401: "
        "mend them"
    )
    columns, notes, _ = drafted(tmp_path, ("x", [*texts, "bad", "x5", "y6", "z7", "z8"]))
    assert columns["x"].kind == "categorical"
    assert "ask: numbers? 397 of 402 values are read as such, 'bad' is not" in notes["x"]


def test_a_few_units_are_listed_and_many_are_asked_about(tmp_path):
    plain = [f"{k % 50}.5" for k in range(300)]
    columns, notes, _ = drafted(tmp_path, ("x", [*plain, "7 kg"]))
    assert (columns["x"].kind, columns["x"].unit) == ("continuous", "")
    assert notes["x"] == "1 values are no number, such as '7 kg' in line 302: mend them"
    columns, notes, _ = drafted(tmp_path, ("x", [*plain, *["7 kg"] * 4]))
    assert columns["x"].unit == "kg"
    assert notes["x"] == "ask: 300 values have no 'kg'; are they in 'kg' too?"


DAYS = [date(1931, 2, 3) + timedelta(days=431 * k) for k in range(60)]
FORMATS = (
    *("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%d.%m.%Y", "%d/%m/%Y", "%d-%m-%Y", "%m/%d/%Y"),
    *("%m-%d-%Y", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y", "%d-%b-%Y", "%d%b%Y"),
    *("%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%SZ", "%d.%m.%Y %H:%M:%S", "%m/%d/%Y %I:%M %p"),
)


@pytest.mark.parametrize("form", FORMATS)
def test_dates_are_read_and_printed_as_dates(form, tmp_path):
    texts = [day.strftime(form) for day in DAYS]
    columns, notes, found = drafted(tmp_path, ("x", texts))
    column = columns["x"]
    assert (column.kind, column.text(column.low), column.text(column.high)) == (
        *("date", str(min(DAYS)), str(max(DAYS))),
    )
    assert column.format == form.partition("T")[0].partition(" %H")[0].partition(" %I")[0]
    assert ("times of day are left out" in notes["x"]) == ("%M" in form)
    assert "a date of birth? That is a quasi-identifier" in notes["x"]
    read = confirmed(tmp_path, found)
    assert [column.text(value) for value in read] == list(map(str, DAYS))
    data = load(str(tmp_path / "t.csv"))
    assert [row[0] for row in data.domain.rows(data.inputs)] == list(map(str, DAYS))


def test_the_order_of_day_and_month_is_asked(tmp_path):
    texts = [f"{k % 12 + 1:02}/{k * 5 % 12 + 1:02}/2024" for k in range(40)]
    columns, notes, found = drafted(tmp_path, ("x", texts))
    assert columns["x"].format == "%d/%m/%Y"
    assert "ask: is '02/06/2024' 2024-06-02 or 2024-02-06? " in notes["x"]
    assert 'For the second: format = "%m/%d/%Y", low = 2024-01-01, high = 2024-12-08' in notes["x"]
    other = confirmed(tmp_path, found, format="%m/%d/%Y")
    days = [date(2024, k % 12 + 1, k * 5 % 12 + 1) for k in range(40)]
    assert [str(found.columns[0].text(value)) for value in other] == list(map(str, days))
    _, notes, _ = drafted(tmp_path, ("x", [*texts, "13/01/2024"]))
    assert "For the second" not in notes["x"]


def test_years_of_two_digits_are_asked_and_high_answers(tmp_path):
    days = [date(1940, 3, 17) + timedelta(days=400 * k) for k in range(60)]
    columns, notes, found = drafted(tmp_path, ("x", [day.strftime("%d.%m.%y") for day in days]))
    assert "ask: years of two digits" in notes["x"]
    assert columns["x"].text(columns["x"].high).startswith("206")
    limits = {"low": -12_000.0, "high": 17_000.0, "typical": None, "spread": None}
    read = confirmed(tmp_path, found, **limits)
    assert [columns["x"].text(value) for value in read] == list(map(str, days))


def test_compact_dates_are_asked_about(tmp_path):
    _, notes, found = drafted(tmp_path, ("x", [day.strftime("%Y%m%d") for day in DAYS]))
    assert 'ask: dates? Then kind = "date", format = "%Y%m%d"' in notes["x"]
    limits = {"low": -15_000.0, "high": 20_000.0, "typical": None, "spread": None}
    read = confirmed(tmp_path, found, kind="date", format="%Y%m%d", **limits)
    assert read.round().tolist() == [(day - date(1970, 1, 1)).days for day in DAYS]


def test_what_is_no_date():
    for text in ("2024-13-01", "31.02.2024", "1.2.3", "192.168.1.1", "2024-01", "x", "1/2", ""):
        assert not formats_of(text)
    assert np.isnan(NumberFormat(format="%d.%m.%Y").read(["01.13.2024", "1" * 70, "", "NA"])).all()


ZIPS = [10115, 80331, 20095, 50667, 60311, 70173, 40213, 44135, 45127, 28195, 14109, 90402, 47051]
ZIPS += [44787, 42103, 33602, 53111, 48143, 76131, 68159, 86150, 65183]


def test_postal_codes_and_sexes_are_asked_about(tmp_path):
    codes = [str(ZIPS[k * 5 % 22]) for k in range(88)]
    zeros = [f"0{code[1:]}" for code in codes]
    others = [("sex", ["f", "m"] * 44), ("who", ["female", "male"] * 44), ("age", codes)]
    columns, notes, _ = drafted(tmp_path, ("a", codes), ("b", zeros), *others)
    assert columns["a"].kind == "integer"
    assert "ask: a number, or a code such as a postal code?" in notes["a"]
    assert columns["b"].kind == "categorical"
    assert notes["b"].startswith("codes, as some begin with 0")
    for name in ("a", "b", "sex", "who", "age"):
        assert "ask: a quasi-identifier?" in notes[name], name
    free, notes, _ = drafted(tmp_path, ("a", [str(7 * k % 3001) for k in range(88)]))
    assert free["a"].kind == "integer"
    assert "quasi" not in notes.get("a", "")


def test_a_label_with_a_comma_and_a_unit(tmp_path):
    prices = [f"{k},{k % 10}5 €" for k in range(50)]
    path = write(tmp_path / "t.csv", ("price", prices), ("x", ["1", "2"] * 25))
    found = Schema.infer(path, "price")
    assert (found.classes, found.target_decimal, found.target_unit) == ((), ",", "€")
    replace(found, confirmed=True).save(tmp_path / "t.toml")
    wanted = [float(f"{k}.{k % 10}5") for k in range(50)]
    assert np.allclose(load(str(path)).labels.numpy(), wanted)
    with pytest.raises(ValueError, match="'day', which cannot be the label; a date is no label"):
        Schema.infer(write(path, ("day", list(map(str, DAYS)))), "day")


@pytest.mark.parametrize(
    ("head", "delimiter", "line"),
    [
        ("sep=;\n", ";", 5),
        ("sep=|\r\n", "|", 5),
        ("SEP=\t\n", "\t", 5),
        ("# of the clinic, 2024; export\n# twice\n\n", ";", 7),
        ("\n\n", "|", 6),
        ("", "|", 4),
    ],
)
def test_what_may_stand_before_the_names(head, delimiter, line, tmp_path):
    rows = ["a,y", "1,no", "2,yes", "3,no"]
    path = tmp_path / "t.csv"
    path.write_text(head + "\n".join(rows).replace(",", delimiter), encoding="utf-8", newline="")
    found = Schema.infer(path)
    assert (found.delimiter, found.classes) == (delimiter, ("no", "yes"))
    replace(found, confirmed=True).save(tmp_path / "t.toml")
    assert load(str(path)).labels.tolist() == [0, 1, 0]
    path.write_text(head + "\n".join(rows).replace(",", delimiter).replace("3", "x"))
    with pytest.raises(ValueError, match=f"line {line}, column 'a': 'x' is no number"):
        load(str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#a,y\n1,2\n3,4\n", "line 1 begins with #: it may be a comment, or the names of the col"),
        ("a,y\n1,2\n# half\n3,4\n", "line 3 is a comment, '# half'; remove it"),
        ("sep=:\na:y\n1:2\n", "delimiter is ':'"),
        ("sep=;\n1,5;2,5\n2,5;3,5\n", "line 2 holds only numbers, such as 1,5"),
        ("# only\n# comments\n", "it is empty"),
        ("sep=;\n", "it is empty"),
    ],
)
def test_what_may_not_stand_before_the_names(text, words, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        Schema.infer(path)


def test_a_line_sep_that_contradicts_the_schema(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("sep=;\na;y\n1;no\n2;yes\n")
    replace(Schema.infer(path), confirmed=True, delimiter=",").save(tmp_path / "t.toml")
    with pytest.raises(ValueError, match="line 1 is 'sep=;', but the schema has delimiter = ','"):
        load(str(path))
