"""What an exported model earns on rows that it was not trained on, by the job's own rewards and
sampling.

A reward that is reported while training is that of the last prompts, and of weights before the last
step. It does not measure how good the exported model is.
"""
