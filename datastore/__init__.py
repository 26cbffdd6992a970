"""A suffix datastore on disk: text that a model is likely to repeat, found by what was written last.

Installed as `ngramspec.datastore`. A datastore is a folder: a JSON `MANIFEST` (format version, tokenizer
fingerprint, vocabulary size, segments with their checksums, files with content hashes) and immutable
segments of tokens with their suffixes sorted. Token ids of a context enter, the continuations of its longest
suffix that occurs in the corpus leave, with their counts and where they come from.

Opening maps files and checks headers, so it costs the same for any size. An update writes new segments and
switches the manifest by an atomic rename; an open reader keeps the generation it opened. A damaged file is a
typed error at open, every value read later is bounds-checked, and nothing is ever unpickled: the worst that a
bad datastore can do is draft badly.

This package imports neither torch nor the rest of ngramspec. It holds no code yet.
"""
