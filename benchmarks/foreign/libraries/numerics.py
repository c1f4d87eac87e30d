"""Gaussian processes, probabilistic programs, differential equations, privacy, attribution."""

from __future__ import annotations

from typing import Any

from foreign.libraries.adaptation import steps_of
from foreign.programs import program


def _curve(device: str) -> Any:
    import torch

    x = torch.linspace(0, 1, 24)
    return x.to(device), torch.sin(6 * x).to(device)


@program("gpytorch/variational", "gpytorch")
def variational(device: str) -> Any:
    import gpytorch

    x, y = _curve(device)

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            posterior = gpytorch.variational.CholeskyVariationalDistribution(6)
            super().__init__(
                gpytorch.variational.VariationalStrategy(self, x[:6].cpu()[:, None], posterior)
            )
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(2.5))

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device)
    model = Model().to(device)
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=24)
    return steps_of(model, lambda: -bound(model(x[:, None]), y), lr=0.05)


@program("torchdiffeq/adjoint", "torchdiffeq")
def adjoint(device: str) -> Any:
    import torch
    from torchdiffeq import odeint_adjoint

    class Field(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
            )

        def forward(self, t: Any, y: Any) -> Any:
            return self.net(y**3)

    field = Field().to(device)
    start = torch.tensor([[2.0, 0.0]]).to(device)
    times = torch.linspace(0, 1, 5).to(device)

    def loss() -> Any:
        return odeint_adjoint(field, start, times, method="dopri5").abs().mean()

    return steps_of(field, loss)


@program("captum/integrated-gradients", "captum.attr")
def attribution(device: str) -> Any:
    import torch
    from captum.attr import IntegratedGradients, LayerGradCam

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(784, 3)
    ).to(device)
    images = torch.rand(2, 3, 16, 16).to(device)
    found, error = IntegratedGradients(model).attribute(
        images, target=torch.tensor([0, 1]).to(device), n_steps=5, return_convergence_delta=True
    )
    cam = LayerGradCam(model, model[0]).attribute(images, target=1)
    return [found.abs().sum().item(), error.abs().sum().item(), cam.abs().sum().item()]
