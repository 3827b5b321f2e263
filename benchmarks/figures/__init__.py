"""What `engines.py` measures: counted operations, interleaved times, and the table they go to."""
