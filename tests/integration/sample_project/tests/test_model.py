import torch
from tagger.data import LENGTH, SUBJECTS, loaders
from tagger.model import Tagger


def test_every_text_gets_a_score_for_every_subject():
    model = Tagger(width=16, depth=1, heads=2)
    scores = model(torch.zeros(3, LENGTH, dtype=torch.long))
    assert scores.shape == (3, SUBJECTS)
    assert scores.isfinite().all()


def test_the_two_sets_differ():
    train, held_back = loaders(0)
    assert not torch.equal(next(iter(train))[0], next(iter(held_back))[0])
