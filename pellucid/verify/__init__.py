"""Proofs that a user can run: modes equal one process, a run that is killed and resumed equals one that was not."""

from pellucid.verify.certificate import Certificate, ModeResult, verify_modes
from pellucid.verify.resume import ResumeProof, verify_resume

__all__ = ["Certificate", "ModeResult", "ResumeProof", "verify_modes", "verify_resume"]
