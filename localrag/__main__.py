from localrag.cli import entry_point

entry_point()
