"""How fast the engine runs on this machine, and how fast the machine would let it run.

Each row times the first call separately, because it compiles and captures, then takes the median of a few more. Beside
it stands the floor: the larger of two times, the arithmetic at the best rate measured on this machine, and the bytes
moved at the speed of a large copy. Where the full size would take minutes, a smaller one is timed and scaled by the
number of images; the row says so.

torch and NumPy are enough; only the row of corruptions also needs scipy and Pillow, and fails with a message without.
"""
