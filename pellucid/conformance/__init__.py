"""Whether a server is what the vendors' own clients expect: cases for any URL, run by each generation of each client.

Every client generation lies in a folder of its own (`pip install --target`), because they exclude one another, and runs its
cases in a process of its own. Cases assert structure, exact counts, and equalities between answers at temperature 0;
none depends on what the model knows, so that random weights pass.
"""
