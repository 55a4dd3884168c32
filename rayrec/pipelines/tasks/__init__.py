"""What runs learn: one file per kind of model, all behind `task.Task`."""
