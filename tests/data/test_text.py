"""Words of many languages, and what ends a line of a text."""

import unicodedata

import pytest

from leakbound.data import load
from leakbound.data.text import words

SPACED = {
    "Arabic, vocalized": "السَّلَامُ عَلَيْكُمْ وَرَحْمَةُ اللَّهِ",
    "Bengali": "আমি বাংলায় কথা বলি",
    "Czech": "příliš žluťoučký kůň",
    "French": "été à la plage déjà où",
    "Greek": "καλημέρα σας φίλε",
    "Hebrew, pointed": "שָׁלוֹם עֲלֵיכֶם רַבִּי",
    "Hindi": "यह हिंदी की परीक्षा है",
    "Korean": "저는 한국어를 합니다",
    "Persian": "می\u200cخواهم کتاب بخوانم",
    "Punjabi": "ਮੈਂ ਪੰਜਾਬੀ ਬੋਲਦਾ ਹਾਂ",
    "Russian": "съешь ещё этих булок",
    "Tamil": "தமிழ் ஒரு செம்மொழி",
    "Telugu": "నేను తెలుగు మాట్లాడతాను",
    "Turkish": "bugün çok güzel",
    "Vietnamese": "tôi nói tiếng việt",
    "Yoruba": "mo ń sọ yorùbá",
}
UNSPACED = {
    "Chinese": ("我们在北京。", "我 们 在 北 京 。"),
    "Japanese": ("私はカメラを見た。", "私 は カメラ を 見 た 。"),
    "Thai": ("ที่นี่ดี", "ที่ นี่ ดี"),
    "Khmer": ("កុំភ្លេច", "កុំ ភ្ លេ ច"),
    "Lao": ("ຂ້ອຍດີ", "ຂ້ ອ ຍ ດີ"),
    "Burmese": ("မြန်မာ", "မြ န် မာ"),
}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("text", SPACED.values(), ids=SPACED)
def test_marks_split_no_word(text, form):
    wanted = [unicodedata.normalize("NFC", word) for word in text.lower().split(" ")]
    assert words(unicodedata.normalize(form, text)) == wanted


@pytest.mark.parametrize(("text", "parts"), UNSPACED.values(), ids=UNSPACED)
def test_scripts_without_spaces_are_cut_into_letters_with_their_marks(text, parts):
    assert words(text) == parts.split(" ")
    assert "".join(words(text)) == text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Don't pay $3.14, x_1!", ["don't", "pay", "$", "3.14", ",", "x_1", "!"]),
        ("l’eau", ["l’eau"]),
        ("a-b a@b.com", ["a", "-", "b", "a", "@", "b.com"]),
        ("👩‍👩‍👧 👍🏽", ["👩‍👩‍👧", "👍🏽"]),
        ("\ufeffa\u200bb", ["a", "b"]),
        ("a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g", [*"abcdefg"]),
        ("\ufeff \u200b \x00", []),
    ],
)
def test_signs_and_letters_that_nobody_sees(text, wanted):
    assert words(text) == wanted


def test_only_line_ends_end_a_record(tmp_path):
    """60 records stay 60 whatever else separates lines, with and without a byte order mark."""
    path = tmp_path / "t.txt"
    wanted = [f"note {k} of the day" for k in range(60)]
    for end in ("\n", "\r\n", "\r"):
        for inner in ("\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"):
            text = end.join(line.replace(" of", f"{inner}of") for line in wanted)
            path.write_bytes(text.encode("utf-8-sig"))
            found = load(f"text:{path}", size=5)
            assert len(found.inputs) == 60
            assert [" ".join(found.domain.text(row)) for row in found.inputs] == wanted


def test_texts_without_spaces_are_read(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("我们在北京。\n你们在上海。\n", encoding="utf-8")
    found = load(f"text:{path}", size=6)
    assert [found.domain.text(row) for row in found.inputs] == [
        (*"我们在北京。",),
        (*"你们在上海。",),
    ]


def test_words_written_in_two_ways_are_one(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text(
        "Été déjà\n" + unicodedata.normalize("NFD", "été déjà") + "\n", encoding="utf-8"
    )
    found = load(f"text:{path}", size=2)
    assert found.inputs[0].tolist() == found.inputs[1].tolist()
