"""One zip that carries localrag to a machine without a network: wheels, models, knowledge bases, and the script that installs them.

select.py        choose what goes in, and check it before anything is written
requirements.py  lock the packages localrag needs to their installed versions, and get their wheels from pip or a folder
pack.py          write the selection into one file: bundle()
manifest.py      the manifest, and every check of an untrusted archive
install.py       restore a bundle into a home: unbundle()
models_toml.py   rewrite and merge models.toml
bootstrap.py     the zip's __main__: make a virtual environment from the wheels; standard library only

OUT.zip:  __main__.py  manifest.json  wheels/*.whl  wheels/requirements.lock  kb/NAME.kb  home/models.toml  home/models/...
home/embedders/...
"""
