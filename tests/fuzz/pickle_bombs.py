"""Small pickles that describe much."""

import struct

MIB = 2**20
TEXT = struct.pack("<I", MIB) + b"a" * MIB
ENCODE = b"c_codecs\nencode\n"
KIND = b"cnumpy\ndtype\nU\x02u1\x85R"


def pickled(*parts):
    return b"\x80\x02}(" + b"".join(parts) + b"u."


def an_array(shape, content):
    return b"cnumpy\nndarray\n)R(K\x01" + shape + KIND + b"\x89" + content + b"tb"


def get(index):
    return b"h%c" % index


LISTS = [b"]q\x00", *(b"]q%c(" % n + get(n - 1) * 10 + b"e" for n in range(1, 9))]
PAIRS = [get(n) + get(n) + b"\x86q%c" % (n + 1) for n in range(60)]
BOMBS = {
    "an index": b"\x80\x02}r" + struct.pack("<I", 2**26) + b".",
    "lists of lists": pickled(b"U\x01a](", *LISTS, b"e"),
    "one string often": pickled(b"U\x01a](T", TEXT, b"q\x00", get(0) * 300, b"e"),
    "one text often": pickled(
        b"U\x01a](X", TEXT, b"\x85q\x00", ENCODE, b"q\x01", (get(1) + get(0) + b"R") * 300, b"e"
    ),
    "one array often": pickled(
        b"U\x01a](T", TEXT, b"q\x00", an_array(b"J\x00\x00\x10\x00\x85", get(0)) * 300, b"e"
    ),
    "a bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**30) + b".",
    "pairs of pairs as a key": pickled(b"U\x00q\x00", *PAIRS, b"K\x01"),
    "a shape of text": pickled(
        b"U\x04data", an_array(b"J\xff\xff\xff\x0fU\x10" + b"a" * 16 + b"\x86", b"U\x01a")
    ),
}
