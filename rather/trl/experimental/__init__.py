"""The paths of trl.experimental: rather.trl.experimental.kto, orpo, cpo and bco."""
