"""A spaCy pipeline, ``["tok2vec", "ner"]``, trained by several Ray actors: gradients summed in five ways.

`corpus` writes the data, `learner` is one worker's spaCy and knows nothing of Ray, `server` is the sharded parameter
server of spacy-ray, `trainer` the same training by collectives, `ways` tells the ways apart, `train` is what
``spacy project run ray-train`` runs, and ``python -m examples.spacy_ner`` times all ways beside each other.
"""
