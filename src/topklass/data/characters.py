"""Which characters the fonts inside matplotlib cover, and in which faces."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from unicodedata import category, name, normalize

from topklass._checks import check_count
from topklass._extras import extra

FACES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10"),
)
"""All faces with text; those of Computer Modern serve letters and digits of ASCII alone."""

SINCE_MATPLOTLIB_3_11 = "cmti10"
"""Left out where matplotlib is older, as on Python 3.10."""

BLOCKS = (
    ("Latin", 0x41, 0x5A),
    ("Greek", 0x391, 0x3A9),
    ("Cyrillic", 0x410, 0x42F),
    ("digits", 0x30, 0x39),
    ("Latin", 0x61, 0x7A),
    ("Greek", 0x3B1, 0x3C9),
    ("Cyrillic", 0x430, 0x44F),
    ("Armenian", 0x531, 0x556),
    ("Armenian", 0x561, 0x586),
    ("Hebrew", 0x5D0, 0x5EA),
    ("Georgian", 0x10D0, 0x10F0),
    ("Arabic", 0x621, 0x64A),
    ("Cyrillic", 0x400, 0x52F),
    ("Greek", 0x370, 0x3FF),
    ("Latin", 0xC0, 0x24F),
    ("phonetic", 0x250, 0x2AF),
    ("currency", 0x20A0, 0x20BF),
    ("punctuation", 0x21, 0x7E),
    ("mathematics", 0x2200, 0x22FF),
    ("Georgian", 0x10A0, 0x10FC),
    ("Tifinagh", 0x2D30, 0x2D67),
    ("N'Ko", 0x7C0, 0x7EA),
    ("Lisu", 0xA4D0, 0xA4F7),
    ("Lao", 0xE81, 0xEC6),
    ("Canadian", 0x1401, 0x1676),
    ("Arabic", 0x66E, 0x6D3),
    ("Greek", 0x1F00, 0x1FFC),
    ("Latin", 0x1E00, 0x1EFF),
    ("arrows", 0x2190, 0x21FF),
    ("shapes", 0x25A0, 0x25FF),
    ("mathematics", 0x2A00, 0x2AFF),
    ("Latin", 0x2C60, 0xA7FF),
    ("symbols", 0x2600, 0x27BF),
)
"""Script, first and last code point: characters are taken in this order, each once."""


class Character(NamedTuple):
    """A class of glyphs."""

    text: str
    script: str
    faces: tuple[int, ...]
    """Indices of the faces that have it."""

    @property
    def name(self) -> str:
        """The character, and its name in Unicode."""
        return f"{self.text} {name(self.text).lower().replace('letter ', '')}"


def characters(number: int) -> tuple[Character, ...]:
    """So many characters, the first ones of all that at least two faces have.

    Args:
        number: how many; more have fewer fonts.

    Returns:
        Characters of many scripts, beginning with capitals that look alike across scripts.
    """
    known = _covered()
    check_count("classes", number, len(known), "the characters that two or more faces have")
    return known[:number]


def face_files() -> list[Path]:
    """The font files of all faces that matplotlib has."""
    folder = Path(extra("matplotlib").get_data_path(), "fonts", "ttf")
    files = []
    for face in FACES:
        file = folder / f"{face}.ttf"
        if file.is_file():
            files.append(file)
        elif face != SINCE_MATPLOTLIB_3_11:
            raise FileNotFoundError(
                f"there is no font {file}: this matplotlib comes without its fonts, "
                "pip install --force-reinstall matplotlib brings them"
            )
    return files


@lru_cache(maxsize=1)
def _covered() -> tuple[Character, ...]:
    font = extra("matplotlib.ft2font").FT2Font
    files = face_files()
    maps = [font(str(file)).get_charmap() for file in files]
    found = []
    for script, code in _candidates():
        faces = tuple(
            face
            for face, known in enumerate(maps)
            if known.get(code, 0)
            and (not files[face].stem.startswith("cm") or _is_ascii_word(code))
        )
        if len(faces) >= 2:
            found.append(Character(chr(code), script, faces))
    return tuple(found)


def _candidates() -> Iterator[tuple[str, int]]:
    """Letters, digits, punctuation and symbols that have a form of their own."""
    seen = set()
    for script, first, last in BLOCKS:
        for code in range(first, last + 1):
            text = chr(code)
            drawn = category(text)[0] in "LNPS" and category(text) not in ("Lm", "Sk")
            own = normalize("NFKC", text) == text
            if drawn and own and code not in seen:
                seen.add(code)
                yield script, code


def _is_ascii_word(code: int) -> bool:
    return code < 128 and chr(code).isalnum()
