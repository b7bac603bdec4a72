"""localrag beside the programs that people would otherwise use: scripts/bench proof.

programs.py says which they are, environments.py makes each a virtual environment of its own, peers/ has an adapter for each, which runs in
it, questions/ holds what is asked of all of them, one file a question, results.py keeps what was measured, and render.py makes a table and
plots of it.
"""
