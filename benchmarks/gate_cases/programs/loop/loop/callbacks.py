"""What happens around the steps."""


class Callback:
    def on_fit_start(self, trainer, module):
        pass

    def on_train_batch_end(self, trainer, module, outputs):
        pass

    def on_validation_batch_end(self, trainer, module, outputs):
        pass

    def on_validation_end(self, trainer, module):
        pass


class Progress(Callback):
    def on_train_batch_end(self, trainer, module, outputs):
        if trainer.global_step % trainer.log_every_n_steps == 0:
            print(f"step {trainer.global_step}: {outputs['loss'].item():.3f}")


class BestScore(Callback):
    """Remembers the weights with the smallest loss, on the host."""

    def __init__(self):
        self.best = float("inf")
        self.weights = None

    def on_validation_end(self, trainer, module):
        score = float(module.logged["val_loss"])
        if score < self.best:
            self.best = score
            self.weights = {name: value.cpu() for name, value in module.state_dict().items()}


REGISTRY = {"Progress": Progress, "BestScore": BestScore}
