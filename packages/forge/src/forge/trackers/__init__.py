"""The record of a run → trackers (W&B, MLflow, TensorBoard, trackio, others) and callbacks, which cannot touch the run.

Files here import settings and the package's own files.
"""
