"""A spaCy pipeline, ``["tok2vec", "ner"]``, trained by several Ray actors: gradients summed in five ways.

`corpus` writes the data, `learner` is one worker's spaCy and does not use Ray, `server` is the sharded parameter
server of spacy-ray, `trainer` the same training by collectives, `ways` defines the ways, `train` is the program of
``spacy project run ray-train``, and ``python -m examples.spacy_ner`` times and compares all ways.
"""
