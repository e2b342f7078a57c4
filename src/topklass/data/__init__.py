"""Data for training image classifiers; needs ``pip install 'topklass[train]'``.

>>> from topklass import data
>>> toy = data.load("glyphs", classes=100, per_class=2, cache=False)
>>> noisy = data.superclass_noise(toy, p=0.4, seed=1)
>>> noisy.record["steps"][0]["step"]
'superclass_noise'
"""

from topklass.data.arrays import read_npz
from topklass.data.cifar import read_cifar
from topklass.data.dataset import Dataset, Pictures, Split, Superclasses
from topklass.data.file_transforms import fixed_views, random_view
from topklass.data.files import ImageFiles
from topklass.data.folder import read_image_folder
from topklass.data.glyphs import glyphs
from topklass.data.label_noise import block_noise, superclass_noise, symmetric_noise
from topklass.data.loading import FORMATS, load
from topklass.data.map_style import from_map_style, map_split
from topklass.data.seeds import generator
from topklass.data.subsets import balanced_subset, hold_out, long_tail
from topklass.data.transforms import IMAGENET, Normalize, cutmix, cutout, mixup, random_crop

__all__ = [
    "FORMATS",
    "IMAGENET",
    "Dataset",
    "ImageFiles",
    "Normalize",
    "Pictures",
    "Split",
    "Superclasses",
    "balanced_subset",
    "block_noise",
    "cutmix",
    "cutout",
    "fixed_views",
    "from_map_style",
    "generator",
    "glyphs",
    "hold_out",
    "load",
    "long_tail",
    "map_split",
    "mixup",
    "random_crop",
    "random_view",
    "read_cifar",
    "read_image_folder",
    "read_npz",
    "superclass_noise",
    "symmetric_noise",
]
