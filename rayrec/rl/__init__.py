"""Reinforcement learning of generative recommenders: rewards, algorithms, and who computes what of them."""
