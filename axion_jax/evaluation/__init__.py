"""How good a checkpoint is, and how to show it: pass@k, intervals, stage tables, reports."""
