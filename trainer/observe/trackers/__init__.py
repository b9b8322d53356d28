"""Trackers of experiments behind one interface: W&B, TensorBoard, MLflow, Trackio, SwanLab."""
