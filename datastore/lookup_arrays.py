"""Define where compiled look-ups find their arrays: the columns of `work` (int64: settings, then addresses of arrays that `Matcher` owns).

Shapes are in `Matcher`.
"""

(N_SEGMENTS, ROWS, MAX_SEQS, MAX_MATCH, MIN_MATCH, NODES, OCCURRENCES, DEPTH, FLOOR, WIDE_IDS, IDS) = range(11)
(PLACES, MATCHES, STATE, LANES, CURSORS, TEXTS, ORDER, GROUPS, CANDIDATES, CHANCES, QUEUE, WEIGHTS) = range(11, 23)
(OUT_START, OUT_TOKENS, OUT_PARENTS, OUT_COUNTS, OUT_MATCH, OUT_PLACE, ALLOWED, SEARCHES, WORK) = range(23, 32)

HELD, COMPLETE, AGE, N_STATE = range(4)  # columns of STATE: occurrences held, whether they are all there are, steps since the last search
N_CANDIDATE = 6  # columns of CANDIDATES, named in match_tree.py
N_GROUPS = 256  # places of the hash table that groups occurrences by their next token: twice as many as there may be
N_BUCKETS = 128  # of the queue of candidates, see `match_tree.build_tree`
