"""Steps of batches → a trained model, and batches → an evaluation: the one loop.

Files here import objectives, adaptations, and what stands below them; nothing of online.
"""
