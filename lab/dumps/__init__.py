"""Dumps of other trainers: token ids with the logprobs of sampling and of training, and what explains their distance"""
