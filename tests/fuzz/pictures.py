"""Image files of all formats, broken; folders of images in any form."""

import io

from hypothesis import strategies as st
from PIL import Image

from .judge import TRACE
from .mutations import edited, edits, mutated

MODES = {
    "PNG": ("1", "L", "P", "RGB", "RGBA", "I;16", "LA"),
    "JPEG": ("L", "RGB", "CMYK"),
    "BMP": ("1", "L", "P", "RGB"),
    "GIF": ("L", "P", "RGB"),
    "PPM": ("1", "L", "RGB", "I;16"),
    "TIFF": ("1", "L", "RGB", "I;16", "F", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    **dict.fromkeys(("EPS", "PDF", "ICO", "TGA", "JPEG2000", "PCX", "SGI"), ("RGB",)),
}
POSTSCRIPT = (
    "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
    f"(%pipe%touch {TRACE}) (w) file closefile\nshowpage\n%%EOF\n"
).encode()


def picture(kind: str, mode: str) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (16, 12)).save(file, kind)
    return file.getvalue()


PICTURES = [picture(kind, mode) for kind, modes in MODES.items() for mode in modes] + [POSTSCRIPT]
SMALL = picture("PNG", "RGB")
FILES = (mutated(PICTURES) | st.sampled_from(PICTURES) | st.binary(max_size=64)).map(
    lambda content: {"toy.png": content}
)

WORDS = (
    "train",
    "val",
    "test",
    "images",
    "a",
    "b",
    "c",
    ".hidden",
    "caf\udce9",
    "new\nline",
    "\x1b[31m",
)
PARTS = st.sampled_from(WORDS)
LEAVES = st.sampled_from(["0.png", "1.JPG", "notes.txt", ".0.png", "x\n.png", "\udce9.png"])
LOOSE = st.builds(
    lambda folders, name: "/".join([*folders, name]), st.lists(PARTS, max_size=4), LEAVES
)
IN_PLACE = st.builds(
    "{}/{}/{}".format, st.sampled_from(("train", "val", "test")), st.sampled_from("abc"), LEAVES
)
WHOLE = {f"{split}/{name}/0.png": SMALL for split in ("train", "test") for name in "ab"}
CONTENT = st.just(SMALL) | st.builds(edited, st.just(SMALL), edits(2)) | st.just(b"")
TREES = st.builds(
    lambda base, more: {**base, **more},
    st.sampled_from([WHOLE, {}]),
    st.dictionaries(IN_PLACE | LOOSE, CONTENT, max_size=6),
).filter(lambda tree: not any(f"{a}/" in f"{b}/" for a in tree for b in tree if a != b))
