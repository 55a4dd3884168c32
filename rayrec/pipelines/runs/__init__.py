"""The folder of a run: its state, snapshots, copies.

Start at `run_folder.RunFolder`.
May import `config`.
"""
