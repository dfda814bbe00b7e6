"""Code that a model wrote, run to be judged: apart from the job, without its secrets, within limits."""
