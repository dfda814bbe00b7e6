"""Starting the processes of a job, and the commands that live beside it."""
