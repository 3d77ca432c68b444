"""A spaCy pipeline, ``["tok2vec", "ner"]``, trained by several Ray actors; `corpus` writes the data, `train` trains."""
