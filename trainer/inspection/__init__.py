"""What a run left in storage, read back and checked: storage, manifest, journal, evidence, recording,
checkpoints.
"""
