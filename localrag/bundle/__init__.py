"""One zip that carries localrag to a machine without a network: wheels, models, knowledge bases, and what starts it there.

choosing.py    what goes in, found and checked before anything is written
packing.py     what is chosen, into one file: bundle()
unpacking.py   back into a home, checked before anything lands: unbundle()
landing.py     what becomes of each thing beside what is there, and the rename by which it lands
manifest.py    what a bundle says of itself, and every check of an archive that nobody vouches for
catalogue.py   models.toml for another machine, and into one that is there
needed.py      which distributions localrag needs, as they are installed
wheelhouse.py  an installed distribution back into a wheel
starter.py     the zip's own __main__: a virtual environment from the wheels; standard library only

OUT.zip:  __main__.py  manifest.json  wheels/*.whl  kb/NAME.kb  home/models.toml  home/models/...  home/embedders/...
"""
