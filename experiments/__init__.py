"""The experiments of the papers, run in a checkout as ``python -m experiments NAME``.

They need ``pip install 'topklass[train]'``, and the published losses ``topklass[bench]``.
"""
