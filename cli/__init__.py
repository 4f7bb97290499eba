"""The command `jaxtwin`: each verb a thin wrapper over a function of the rooms."""
